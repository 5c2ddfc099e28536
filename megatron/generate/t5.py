"""Generation with T5."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from megatron.generate.checks import check_length, check_rows, limits_of
from megatron.generate.loop import OnToken, Rows, filled_up, generate
from megatron.generate.part import Part, part_of
from megatron.generate.reader import Reader
from megatron.generate.relay import relay, to_all_stages
from megatron.generate.sampling import Sampling, chooser, keys_of
from megatron.model.head import Logits
from megatron.model.sizes import T5Sizes
from megatron.model.t5 import T5DecoderLayer, T5EncoderLayer, embed, tied_logits
from megatron.stages import t5_units

PADDING = -1
"""The segment of what fills a source up: nothing attends to it."""


def generate_t5(
    model: Any,
    sources: Rows,
    *,
    start_id: int,
    max_new_tokens: int | None = None,
    eos_id: int | None = None,
    sampling: Sampling | None = None,
    keys: Sequence[bytes] | None = None,
    on_token: OnToken | None = None,
) -> list[list[int]]:
    """Return what T5's decoder says to each source, without ``start_id``. Collective over the replica.

    Sources may have any lengths: each gets what it would get alone.

    Args:
        model: as ``part_of`` takes it.
        sources: the encoder's rows of tokens, the same on every rank of the replica. They end as the model's inputs in
            training did (``T5Tokens.eos_id``).
        start_id: the decoder's first token (``T5Tokens.start_id``).
        others: as ``generate_gpt2``.

    Raises:
        TypeError: another model.
        DataError: rows that the model cannot take, or more tokens than it has positions.
        NumericsError: the logits are not numbers.
    """
    part = part_of(model)
    sizes = part.sizes
    if not isinstance(sizes, T5Sizes):
        raise TypeError("generate_t5 needs a T5, got a model without a decoder of its own. Use generate_gpt2.")
    check_rows("start_id", [[start_id]], sizes.vocab_size)
    limits = t5_limits(sizes, sources, max_new_tokens)
    choose = chooser(part, sampling, keys_of(sources) if keys is None else keys)
    with part.evaluating():
        reader = T5Reader(part, sources, max(limits))
        starts = [[start_id]] * len(sources)
        return generate(part, reader, starts, limits=limits, eos_id=eos_id, choose=choose, on_token=on_token)


def t5_limits(sizes: T5Sizes, sources: Rows, max_new_tokens: int | None) -> list[int]:
    """Return how many tokens each answer may have.

    Raises:
        DataError: the model cannot take the sources, or so many tokens in an answer.
    """
    check_rows("sources", sources, sizes.vocab_size)
    positions = None if sizes.is_relative else sizes.max_position_embeddings
    if positions is not None:
        check_length("prompt", [len(source) for source in sources], positions)
    return limits_of("the start of answer", [1] * len(sources), max_new_tokens, positions)


class T5Reader(Reader):
    """The decoder, which has the encoder's output before it. Collective over the replica, from its making on.

    The output crosses to all stages once; each decoder layer keeps the keys and values that it makes of it.
    """

    def __init__(self, part: Part, sources: Rows, capacity: int) -> None:
        assert isinstance(part.sizes, T5Sizes)
        self.sizes: T5Sizes = part.sizes
        units = t5_units(self.sizes.enc_layers, self.sizes.dec_layers)
        super().__init__(part, capacity, range(units.dec_embedding, units.dec_norm))
        tokens, last = filled_up(sources)  # [b, s_e], [b]
        is_padding = torch.arange(tokens.shape[1]) > last[:, None]  # [b, s_e]
        self.sources = tokens.to(part.device)
        has_padding = bool(is_padding.any())
        self.segments = torch.where(is_padding, PADDING, 0).int().to(part.device) if has_padding else None
        shape = (tokens.shape[1], len(sources), self.sizes.hidden_size)
        output = relay(part, range(units.enc_norm + 1), self._encode, shape)
        memory = to_all_stages(part, output, shape, part.stages[units.enc_norm])  # [s_e, b, h]
        self.memory: torch.Tensor | None = memory

    def _encode(self, number: int, x: torch.Tensor | None) -> torch.Tensor:
        unit = self.part.units[number]
        if x is None:
            how: dict[str, Any] = {
                "sizes": self.sizes,
                "place": self.part.place,
                "side": "encoder",
                "training": False,
            }
            return embed(self.sources, unit.word, getattr(unit, "position", None), segments=self.segments, **how)
        if isinstance(unit, T5EncoderLayer):
            return T5EncoderLayer.forward(unit, x, self.part.biases[number], self.segments)
        return getattr(unit, "norm", unit)(x)

    def read(self, tokens: torch.Tensor, positions: torch.Tensor, last: torch.Tensor) -> torch.Tensor | None:
        logits = super().read(tokens, positions, last)
        self.memory = None  # its keys and values are kept from here on
        return logits

    def keep(self, rows: list[int]) -> None:
        super().keep(rows)
        if self.segments is not None:
            self.segments = self.segments[torch.tensor(rows, device=self.segments.device)]

    def embedded(self, unit: Any) -> torch.Tensor:
        x = unit.word(self.tokens.t())  # [s, b, h]
        position = getattr(unit, "position", None)
        return x if position is None else x + position(self.positions.t())

    def layer(self, number: int, unit: Any, x: torch.Tensor) -> torch.Tensor:
        own = None if self.segments is None else torch.zeros_like(self.tokens, dtype=torch.int32)
        return T5DecoderLayer.forward(
            unit, x, self.memory, self.part.biases[number], self.segments, own, self.caches[number]
        )

    def tied_logits(self, x: torch.Tensor, weight: torch.Tensor) -> Logits:
        return tied_logits(x, weight, self.sizes, self.part.place)
