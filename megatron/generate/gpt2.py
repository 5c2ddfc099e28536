"""Generation with GPT-2 and the other models that go on from a prompt (``GENERATION`` of a family)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from megatron.generate.checks import check_rows, limits_of
from megatron.generate.loop import OnToken, Rows, generate
from megatron.generate.part import Part, part_of
from megatron.generate.reader import Reader
from megatron.generate.sampling import Sampling, chooser, keys_of
from megatron.model.generation import Decoder
from megatron.model.head import logits_of
from megatron.model.sizes import Sizes, T5Sizes
from megatron.models.registry import load


def generate_gpt2(
    model: Any,
    prompts: Rows,
    *,
    max_new_tokens: int | None = None,
    eos_id: int | None = None,
    sampling: Sampling | None = None,
    keys: Sequence[bytes] | None = None,
    on_token: OnToken | None = None,
) -> list[list[int]]:
    """Return how a decoder goes on from each prompt, without the prompt. Collective over the replica.

    Prompts may have any lengths: each gets what it would get alone.

    Args:
        model: as ``part_of`` takes it.
        prompts: rows of tokens, the same on every rank of the replica.
        max_new_tokens: for each prompt; None: 64, or fewer where the model's positions end.
        eos_id: ends a row, and is its last token then; None: nothing does.
        sampling: None: the likeliest token each time.
        keys: of the random numbers; None: ``keys_of(prompts)``.
        on_token: called with (row, token) as tokens come, on every rank.

    Raises:
        TypeError: another model.
        DataError: rows that the model cannot take, or more tokens than it has positions.
        NumericsError: the logits are not numbers.
    """
    part = part_of(model)
    sizes = part.sizes
    if isinstance(sizes, T5Sizes):
        raise TypeError("generate_gpt2 needs a decoder, got an encoder-decoder. Use generate_t5.")
    limits = gpt2_limits(sizes, prompts, max_new_tokens)
    capacity = max(len(prompt) + limit - 1 for prompt, limit in zip(prompts, limits, strict=True))
    choose = chooser(part, sampling, keys_of(prompts) if keys is None else keys)
    with part.evaluating():
        reader = DecoderReader(part, capacity)
        return generate(part, reader, prompts, limits=limits, eos_id=eos_id, choose=choose, on_token=on_token)


def gpt2_limits(sizes: Sizes, prompts: Rows, max_new_tokens: int | None) -> list[int]:
    """Return how many new tokens each prompt may have.

    Raises:
        DataError: the model cannot take the prompts, or so many new tokens.
    """
    check_rows("prompts", prompts, sizes.vocab_size)
    positions = sizes.max_position_embeddings if load(sizes.family, "model").GENERATION.has_end else None
    return limits_of("prompt", [len(prompt) for prompt in prompts], max_new_tokens, positions)


class DecoderReader(Reader):
    """Attention looks back only, so what fills a row up at its end acts on nothing before it."""

    def __init__(self, part: Part, capacity: int) -> None:
        super().__init__(part, capacity, range(part.sizes.num_layers + 1))
        self.kind: Decoder = load(part.sizes.family, "model").GENERATION
        self.mask_of = self.kind.mask(part.sizes, part.place)

    def embedded(self, unit: torch.nn.Module) -> torch.Tensor:
        return self.kind.embed(unit, self.tokens, self.positions)

    def layer(self, number: int, unit: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        """The layer of a pipeline has a ``forward`` of its own, so the family's is called by its class."""
        return self.kind.layer.forward(unit, x, self.mask_of(self.slots, x.dtype), self.caches[number])

    def tied_logits(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return logits_of(x, weight, self.part.place)
