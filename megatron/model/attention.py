"""Attention with its heads cut over the tensor-parallel group."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from megatron.model.cache import LayerCache
from megatron.model.sizes import Place, Sizes
from megatron.mpu.layers import ColumnParallelLinear, RowParallelLinear, divide
from megatron.ops.attention import attention
from megatron.ops.causal_attention import causal_self_attention, heads_of


class Attention(nn.Module):
    """Heads and their dropout: what all kinds of attention share.

    Args:
        site: tells this attention's dropout masks from others of the layer.
    """

    def __init__(self, sizes: Sizes, place: Place, layer: int, site: str = "attention") -> None:
        super().__init__()
        self.num_heads = divide("--num-attention-heads", sizes.num_attention_heads, place.group)
        self.head_size = sizes.kv_hidden_size
        self.layer, self.site = layer, site
        self.dropout = sizes.attention_dropout
        self.is_cut = place.group.size > 1
        self.streams = place.streams
        self.is_recomputed = sizes.recompute_attention

    def split_heads(self, packed: torch.Tensor, parts: int) -> list[torch.Tensor]:
        """Return the parts of each head, whose columns lie together.

        Shapes:
            packed [s, b, parts a d / t]
            output parts x [b, a/t, s, d]
        """
        return heads_of(self.by_head(packed, parts))

    def by_head(self, packed: torch.Tensor, parts: int) -> torch.Tensor:
        """Return ``packed`` as [s, b, a/t, parts, d]."""
        return packed.view(*packed.shape[:2], self.num_heads, parts, self.head_size)

    def attend(
        self, function: Callable[..., torch.Tensor], query: torch.Tensor, *args: Any, **how: Any
    ) -> torch.Tensor:
        """Return what ``function`` makes of query, key and value, with the dropout masks of this place.

        Shapes:
            query  [b, a/t, s, d], or [s, b, a/t, 3, d] with key and value beside it
            output [s, b, a d / t]
        """
        core = partial(self._core, partial(function, **how))
        if self.is_recomputed and torch.is_grad_enabled():
            context = self.streams.recomputed(core, query, *args)  # [b, a/t, s, d]
        else:
            context = core(query, *args)  # [b, a/t, s, d]
        return context.permute(2, 0, 1, 3).flatten(2)

    def _core(self, function: Callable[..., torch.Tensor], query: torch.Tensor, *args: Any) -> torch.Tensor:
        if not self.training or self.dropout == 0.0:
            return function(query, *args)
        return self.streams.attend(
            partial(function, query, *args),
            self.dropout,
            device=query.device,
            layer=self.layer,
            site=self.site,
            is_cut=self.is_cut,
        )


class SelfAttention(Attention):
    """Multi-head attention of a sequence to itself.

    The query, key and value weights are one matrix whose rows are ordered by head (query, key and value of the first
    head, then of the second), so that a contiguous cut gives each rank whole heads.

    Shapes:
        x      [s, b, h], or this rank's part of it, by ``place``
        mask   bool [b or 1, 1, s, s] or None for causal
        output as x

    With a ``cache`` the keys and values of earlier passes count too, and the mask is [b or 1, 1, s, s_k].
    """

    def __init__(self, sizes: Sizes, place: Place, layer: int) -> None:
        super().__init__(sizes, place, layer)
        self.query_key_value = ColumnParallelLinear(
            sizes.hidden_size, 3 * sizes.attention_width, bias=sizes.hidden_bias, **place.cut
        )
        self.dense = RowParallelLinear(sizes.attention_width, sizes.hidden_size, bias=sizes.hidden_bias, **place.cut)

    def forward(
        self, x: torch.Tensor, mask: torch.Tensor | None = None, cache: LayerCache | None = None
    ) -> torch.Tensor:
        packed = self.query_key_value(x)  # [s, b, 3 a d / t]
        if mask is None and cache is None:
            return self.dense(self.attend(causal_self_attention, self.by_head(packed, 3)))
        query, key, value = self.split_heads(packed, 3)  # 3 x [b, a/t, s, d]
        if cache is not None:
            key, value = cache.extended(key, value)  # 2 x [b, a/t, s_k, d]
        return self.dense(self.attend(attention, query, key, value, mask=mask))
