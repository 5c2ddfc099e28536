"""The parts of a decoder that goes on from a prompt."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from megatron.model.cache import Slots
from megatron.model.embedding import WordEmbedding
from megatron.model.norm import LayerNorm
from megatron.model.sizes import Place, Sizes

Mask = Callable[[Slots, torch.dtype], torch.Tensor | None]
"""What attention adds or may look at in a pass, as the layers of the family take it."""


def slots_mask(sizes: Any, place: Place) -> Mask:
    """Return the mask of a decoder whose attention adds nothing to the scores."""
    return lambda slots, dtype: slots.mask


def layer_norm(sizes: Sizes) -> nn.Module:
    """Return the last norm of a decoder with layer norms."""
    return LayerNorm(sizes.hidden_size, sizes.layernorm_epsilon)


def embed_words(unit: Any, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Return the hidden states of an embedding of words alone."""
    return WordEmbedding.forward(unit, tokens)


@dataclass(frozen=True, kw_only=True)
class Decoder:
    """The parts with which a family goes on from a prompt: ``GENERATION`` in the file of its model.

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
    norm: Callable[[Any], nn.Module] = layer_norm
    mask: Callable[[Any, Place], Mask] = slots_mask
    has_end: bool = True
