"""The units of one stage as a module whose parameters have the names of the whole model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from megatron.generate.part import Part
from megatron.model.head import Head
from megatron.model.sizes import Place, Sizes, T5Sizes
from megatron.model.t5 import RelativeBias, T5DecoderLayer, T5Embedding, T5EncoderLayer, make_final_norm
from megatron.models.registry import load
from megatron.mpu.groups import Group
from megatron.mpu.layers import VocabParallelEmbedding
from megatron.stages import balanced_bounds, t5_units


class WordTable(nn.Module):
    """The word table alone, for a tied head on another stage than the embedding."""

    def __init__(self, sizes: Sizes, place: Place) -> None:
        super().__init__()
        self.word = VocabParallelEmbedding(
            sizes.vocab_size, sizes.hidden_size, divisible_by=sizes.make_vocab_size_divisible_by, group=place.group
        )


class StageModel(nn.Module):
    """What a stage holds. ``units`` are its modules by number; a layer's name is its number in the whole model."""

    def __init__(self, sizes: Sizes, place: Place, numbers: range) -> None:
        super().__init__()
        self.units: dict[int, nn.Module] = {}
        self.biases: dict[int, nn.Module | None] = {}
        if isinstance(sizes, T5Sizes):
            self._build_t5(sizes, place, numbers)
        else:
            self._build_decoder(sizes, place, numbers)

    def _build_decoder(self, sizes: Sizes, place: Place, numbers: range) -> None:
        norm, parts = sizes.num_layers + 1, load(sizes.family, "model").GENERATION
        self._add_tables(sizes, place, numbers, embeddings=(0,), head=norm + 1)
        layers = {n: parts.layer(sizes, place, n - 1) for n in numbers if 0 < n < norm}
        self.layers = nn.ModuleDict({str(n - 1): layer for n, layer in layers.items()})
        self.units.update(layers)
        if norm in numbers:
            self.final_norm = self.units[norm] = parts.norm(sizes)

    def _build_t5(self, sizes: T5Sizes, place: Place, numbers: range) -> None:
        units = t5_units(sizes.enc_layers, sizes.dec_layers)
        embeddings = (units.enc_embedding, units.dec_embedding)
        self._add_tables(sizes, place, numbers, embeddings=embeddings, head=units.head)
        own = [n for n in units.enc_layers if n in numbers]
        encoder = {n: T5EncoderLayer(sizes, place, units.enc_layers.index(n)) for n in own}
        own = [n for n in units.dec_layers if n in numbers]
        decoder = {n: T5DecoderLayer(sizes, place, sizes.enc_layers + units.dec_layers.index(n)) for n in own}
        self.encoder = self._side(sizes, place, "encoder", units.enc_layers, encoder, units.enc_norm in numbers)
        self.decoder = self._side(sizes, place, "decoder", units.dec_layers, decoder, units.dec_norm in numbers)

    def _side(
        self, sizes: T5Sizes, place: Place, name: str, numbers: range, layers: Mapping[int, nn.Module], has_norm: bool
    ) -> nn.Module:
        side = nn.Module()
        side.layers = nn.ModuleDict({str(numbers.index(n)): layer for n, layer in layers.items()})
        bias = RelativeBias(sizes, place, name == "encoder") if sizes.is_relative and layers else None
        side.add_module("bias", bias)
        self.units.update(layers)
        self.biases.update(dict.fromkeys(layers, bias))
        if has_norm:
            side.final_norm = self.units[numbers.stop] = make_final_norm(sizes, place, name)
        return side

    def _add_tables(
        self, sizes: Sizes, place: Place, numbers: range, *, embeddings: tuple[int, ...], head: int
    ) -> None:
        """Add what reads and makes tokens; one table where embedding and tied head meet."""
        own = [n for n in embeddings if n in numbers]
        has_head = head in numbers
        tied = [head] if has_head and not sizes.untie_embeddings else []
        if own or tied:
            is_t5 = isinstance(sizes, T5Sizes)
            whole: Any = T5Embedding if is_t5 else load(sizes.family, "model").GENERATION.embedding
            kind = whole if own else WordTable
            self.embedding = kind(sizes, place)
            self.units.update(dict.fromkeys((*own, *tied), self.embedding))
        if has_head and not tied:
            self.head = self.units[head] = Head(sizes, place)


def bounds_of(sizes: Sizes, num_stages: int) -> list[int]:
    """Return where the list of units is cut into stages: by what a stage reads for a token, its weights.

    A layer of T5's decoder has a third more than one of its encoder; embeddings and norms cost nothing, since a token
    reads a row of them; the head costs its table.

    Raises:
        ValueError: fewer layers than stages.
    """
    head = sizes.vocab_size / (12 * sizes.hidden_size)
    if isinstance(sizes, T5Sizes):
        costs = [0.0, *[1.0] * sizes.enc_layers, 0.0, 0.0, *[4 / 3] * sizes.dec_layers, 0.0, head]
        num_layers = sizes.enc_layers + sizes.dec_layers
    else:
        costs = [0.0, *[1.0] * sizes.num_layers, 0.0, head]
        num_layers = sizes.num_layers
    if num_stages > num_layers:
        raise ValueError(
            f"--pipe-parallel-size must be at most the {num_layers} layers of the model, got {num_stages}. Lower it"
        )
    return balanced_bounds(costs, num_stages)


def build(sizes: Sizes, place: Place, pipe: Group, *, dtype: torch.dtype, device: torch.device) -> Part:
    """Return this rank's part of a model, its weights zero, of ``dtype`` and on ``device`` from the start.

    Raises:
        ValueError: the sizes cannot be cut so.
    """
    bounds = bounds_of(sizes, pipe.size)
    usual = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            module = StageModel(sizes, place, range(bounds[pipe.rank], bounds[pipe.rank + 1]))
    finally:
        torch.set_default_dtype(usual)
    stages = [stage for stage in range(pipe.size) for _ in range(bounds[stage], bounds[stage + 1])]
    return Part(module.eval(), sizes, place, module.units, stages, pipe, module.biases)
