"""Greedy decoding with GPT-2."""

from __future__ import annotations

from typing import Any

import torch

from megatron.generate.greedy import Rows, check_positions, check_rows, greedy
from megatron.generate.replica import Inputs, Replica
from megatron.model.sizes import T5Sizes


def greedy_gpt2(model: Any, prompts: Rows, *, max_new_tokens: int, eos_id: int | None = None) -> list[list[int]]:
    """Return how GPT-2 goes on from each prompt, without the prompt. Collective over the replica.

    Prompts may have any lengths: attention looks back only, so what fills a row up at its end acts on nothing.

    Args:
        model: as ``Replica`` takes it.
        prompts: rows of tokens, the same on every rank of the replica.
        eos_id: ends a row, and is its last token then; None: every row has ``max_new_tokens``.

    Raises:
        TypeError: another model.
        ValueError: rows that the model cannot take, or more tokens than it has positions.
    """
    replica = Replica(model)
    sizes = replica.sizes
    if isinstance(sizes, T5Sizes):
        raise TypeError("greedy_gpt2 needs a GPT-2, got an encoder-decoder. Use greedy_t5.")
    check_rows("prompts", prompts, sizes.vocab_size, max_new_tokens)
    fed = max(len(prompt) for prompt in prompts) + max_new_tokens - 1
    check_positions("a prompt with all new tokens but the last", fed, sizes.max_position_embeddings)

    def next_tokens(tokens: torch.Tensor, last: torch.Tensor) -> list[int]:
        positions = torch.arange(tokens.shape[1]).expand(tokens.shape).contiguous()
        inputs: Inputs = tokens, positions, _one_document(tokens) if replica.needs_segments else None
        return replica.next_tokens(inputs, last)

    return greedy(next_tokens, prompts, max_new_tokens=max_new_tokens, eos_id=eos_id)


def _one_document(tokens: torch.Tensor) -> torch.Tensor:
    return torch.zeros(tokens.shape, dtype=torch.int32)
