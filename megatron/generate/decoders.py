"""The models that go on from a prompt, each told by its parts: a family is a line."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from megatron.config import Config, ModelConfig
from megatron.model.alibi import AlibiBias
from megatron.model.cache import Slots
from megatron.model.embedding import Embedding, WordEmbedding
from megatron.model.layer import TransformerLayer
from megatron.model.llama import LlamaLayer
from megatron.model.llama import make_norm as llama_norm
from megatron.model.mpt import MptLayer, make_norm
from megatron.model.norm import LayerNorm
from megatron.model.sizes import (
    LlamaSizes,
    MptSizes,
    Place,
    Sizes,
    llama_sizes_from,
    mpt_sizes_from,
    sizes_from,
    t5_sizes_from,
)

Mask = Callable[[Slots, torch.dtype], torch.Tensor | None]
"""What attention adds or may look at in a pass, as the layers of the family take it."""


def _slots_mask(sizes: Any, place: Place) -> Mask:
    return lambda slots, dtype: slots.mask


def _layer_norm(sizes: Sizes) -> nn.Module:
    return LayerNorm(sizes.hidden_size, sizes.layernorm_epsilon)


def _words(unit: Any, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    return WordEmbedding.forward(unit, tokens)


@dataclass(frozen=True, kw_only=True)
class Decoder:
    """The parts of a family.

    Args:
        embedding: built from (sizes, place); its table is ``word``.
        embed: given an embedding, or the first layer of a pipeline that is one, and tokens and positions [b, s], its
            hidden states [s, b, h].
        layer: built from (sizes, place, number); its ``forward`` takes hidden states, mask and cache, and finds the
            positions of the pass in ``cache.slots.positions``.
        norm: the last norm.
        mask: makes the masks of a model of these sizes.
        has_end: no token stands beyond ``max_position_embeddings``.
    """

    embedding: Callable[[Any, Place], nn.Module]
    embed: Callable[[Any, torch.Tensor, torch.Tensor], torch.Tensor]
    layer: type[nn.Module]
    norm: Callable[[Any], nn.Module] = _layer_norm
    mask: Callable[[Any, Place], Mask] = _slots_mask
    has_end: bool = True


DECODERS: Mapping[type[Sizes], Decoder] = {
    Sizes: Decoder(embedding=Embedding, embed=Embedding.forward, layer=TransformerLayer),
    LlamaSizes: Decoder(embedding=WordEmbedding, embed=_words, layer=LlamaLayer, norm=llama_norm),
    MptSizes: Decoder(
        embedding=WordEmbedding,
        embed=_words,
        layer=MptLayer,
        norm=make_norm,
        mask=lambda sizes, place: AlibiBias(sizes, place).for_slots,
        has_end=False,
    ),
}
"""Sizes of a family -> its parts."""

SIZES: Mapping[str, Callable[[ModelConfig, Config], Sizes]] = {
    "gpt2": lambda model, config: sizes_from(model),
    "t5": lambda model, config: t5_sizes_from(model, config.t5),
    "llama": lambda model, config: llama_sizes_from(model, config.llama),
    "mpt": lambda model, config: mpt_sizes_from(model, config.mpt),
}
"""Family that generates -> its sizes, of a section ``model`` and the configuration."""
