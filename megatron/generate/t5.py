"""Greedy decoding with T5."""

from __future__ import annotations

from typing import Any

import torch

from megatron.generate.greedy import Rows, check_positions, check_rows, filled_up, greedy
from megatron.generate.replica import Replica
from megatron.model.sizes import T5Sizes

PADDING = -1
"""The segment of what fills a source up: nothing attends to it."""


def greedy_t5(
    model: Any, sources: Rows, *, start_id: int, max_new_tokens: int, eos_id: int | None = None
) -> list[list[int]]:
    """Return what T5's decoder says to each source, without ``start_id``. Collective over the replica.

    Sources of unequal lengths go through the model together, those that are shorter filled up with a segment of their
    own; in a pipeline whose stages pass no segments on, those of one length do.

    Args:
        model: as ``Replica`` takes it.
        sources: the encoder's rows of tokens, the same on every rank of the replica. They end as the model's inputs in
            training did (``T5Tokens.eos_id``).
        start_id: the decoder's first token (``T5Tokens.start_id``).
        eos_id: ends a row, and is its last token then; None: every row has ``max_new_tokens``.

    Raises:
        TypeError: another model.
        ValueError: rows that the model cannot take, or more tokens than it has positions.
    """
    replica = Replica(model)
    sizes = replica.sizes
    if not isinstance(sizes, T5Sizes):
        raise TypeError("greedy_t5 needs a T5, got a model without a decoder of its own. Use greedy_gpt2.")
    check_rows("sources", sources, sizes.vocab_size, max_new_tokens)
    check_rows("start_id", [[start_id]], sizes.vocab_size, max_new_tokens)
    if not sizes.is_relative:
        positions = sizes.max_position_embeddings
        check_positions("a source", max(len(source) for source in sources), positions)
        check_positions("the start token with all new tokens but the last", max_new_tokens, positions)
    rows: list[list[int]] = [[] for _ in sources]
    for together in _batches(sources, replica.takes_segments):
        source = _Source(replica, [sources[index] for index in together])
        starts = [[start_id] for _ in together]
        decoded = greedy(source.next_tokens, starts, max_new_tokens=max_new_tokens, eos_id=eos_id)
        for index, row in zip(together, decoded, strict=True):
            rows[index] = row
    return rows


def _batches(sources: Rows, takes_segments: bool) -> list[list[int]]:
    """Return which sources go through the model together: all of them, or those of one length."""
    if takes_segments:
        return [list(range(len(sources)))]
    lengths = dict.fromkeys(len(source) for source in sources)
    return [[index for index, source in enumerate(sources) if len(source) == length] for length in lengths]


class _Source:
    """The encoder's side of a batch, the same at each step."""

    def __init__(self, replica: Replica, rows: Rows) -> None:
        self.replica = replica
        self.tokens, last = filled_up(rows)  # [b, s_e], [b]
        is_padding = torch.arange(self.tokens.shape[1]) > last[:, None]  # [b, s_e]
        self.segments: torch.Tensor | None = None
        if replica.needs_segments or is_padding.any():
            self.segments = torch.where(is_padding, PADDING, 0).int()

    def next_tokens(self, tokens: torch.Tensor, last: torch.Tensor) -> list[int]:
        """Return what follows the decoder's ``tokens`` [b, s_d] in each row."""
        segments = None if self.segments is None else torch.zeros(tokens.shape, dtype=torch.int32)
        return self.replica.next_tokens((self.tokens, tokens, self.segments, segments), last)
