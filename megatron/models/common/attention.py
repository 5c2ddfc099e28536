"""Attention, SelfAttention; KV cache; masks made once for all layers of a stage."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from megatron.models.common.model_args import ModelArgs, ParallelContext
from megatron.mpu.layers import ColumnParallelLinear, RowParallelLinear, divide
from megatron.ops.attention import attention
from megatron.ops.causal_attention import causal_self_attention, heads_of

# Keys and values that attention has seen, kept from one pass to the next while text is generated.


@dataclass
class KVCacheSlots:
    """Where the tokens of the present pass lie in the caches of all layers: a token's slot is its position.

    Rows may stand at different positions. A row's slots beyond its newest token may hold anything: its queries do not
    look there, and its later tokens overwrite it.

    Args:
        capacity: positions that there will be, in the longest row.
        positions: [b, s], those of this pass; before the first pass None.
        stop: one more than the largest of all positions so far.
        mask: bool [b, 1, s, stop], True where a query may look; None in a first pass, where all rows begin at 0 and
            attention is causal anyway.
    """

    capacity: int
    positions: torch.Tensor | None = None
    stop: int = 0
    mask: torch.Tensor | None = None

    def advance(self, positions: torch.Tensor) -> None:
        """Begin a pass over tokens at ``positions`` [b, s]; in the first these are 0 ... s-1 in each row."""
        is_first = self.positions is None
        self.positions = positions
        self.stop = int(positions.max()) + 1
        slots = torch.arange(self.stop, device=positions.device)
        self.mask = None if is_first else (slots <= positions.unsqueeze(2)).unsqueeze(1)


class LayerKVCache:
    """Keys and values of one layer: of its self-attention, and of its attention to the encoder where it has one.

    Shapes:
        each [b, a/t, capacity, d]; to the encoder [b, a/t, s_e, d]
    """

    def __init__(self, slots: KVCacheSlots) -> None:
        self.slots = slots
        self.own: tuple[torch.Tensor, torch.Tensor] | None = None
        self.cross: tuple[torch.Tensor, torch.Tensor] | None = None

    def extended(self, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keep the keys and values of this pass; return those of all positions so far.

        Shapes:
            key, value [b, a/t, s, d]
            output     2 x [b, a/t, stop, d]
        """
        if self.own is None:
            b, a, s, d = key.shape
            self.own = key.new_zeros(b, a, self.slots.capacity, d), value.new_zeros(b, a, self.slots.capacity, d)
            for kept, new in zip(self.own, (key, value), strict=True):
                kept[:, :, :s] = new
            return key, value
        assert self.slots.positions is not None
        places = self.slots.positions[:, None, :, None].expand_as(key)  # [b, a/t, s, d]
        for kept, new in zip(self.own, (key, value), strict=True):
            kept.scatter_(2, places, new)
        return self.own[0][:, :, : self.slots.stop], self.own[1][:, :, : self.slots.stop]

    def keep(self, rows: torch.Tensor) -> None:
        """Go on with these ``rows`` of the batch only."""
        if self.own is not None:
            self.own = self.own[0][rows], self.own[1][rows]
        if self.cross is not None:
            self.cross = self.cross[0][rows], self.cross[1][rows]


# Attention with its heads cut over the tensor-parallel group.


class Attention(nn.Module):
    """Heads and their dropout: what all kinds of attention share.

    Args:
        site: tells this attention's dropout masks from others of the layer.
    """

    def __init__(self, sizes: ModelArgs, place: ParallelContext, layer: int, site: str = "attention") -> None:
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

    def __init__(self, sizes: ModelArgs, place: ParallelContext, layer: int) -> None:
        super().__init__(sizes, place, layer)
        self.query_key_value = ColumnParallelLinear(
            sizes.hidden_size, 3 * sizes.attention_width, bias=sizes.hidden_bias, **place.cut
        )
        self.dense = RowParallelLinear(sizes.attention_width, sizes.hidden_size, bias=sizes.hidden_bias, **place.cut)

    def forward(
        self, x: torch.Tensor, mask: torch.Tensor | None = None, cache: LayerKVCache | None = None
    ) -> torch.Tensor:
        packed = self.query_key_value(x)  # [s, b, 3 a d / t]
        if mask is None and cache is None:
            return self.dense(self.attend(causal_self_attention, self.by_head(packed, 3)))
        query, key, value = self.split_heads(packed, 3)  # 3 x [b, a/t, s, d]
        if cache is not None:
            key, value = cache.extended(key, value)  # 2 x [b, a/t, s_k, d]
        return self.dense(self.attend(attention, query, key, value, mask=mask))


# What all layers of a stage share of a micro-batch, made once of a tensor that each of them is given.


class LastValueCache:
    """What was made of a tensor last, as long as it is the same tensor and nobody has written to it."""

    def __init__(self) -> None:
        self._key: tuple[weakref.ref[torch.Tensor], int] | None = None
        self._made: torch.Tensor | None = None

    def of(self, key: torch.Tensor, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Return what ``make`` returned for ``key`` last, or returns now."""
        is_known = self._key is not None and self._key[0]() is key and self._key[1] == key._version
        if self._made is None or not is_known:
            self._made, self._key = make(), (weakref.ref(key), key._version)
        return self._made

    def forget(self) -> None:
        """Make it anew the next time."""
        self._key = self._made = None


class SharedMask:
    """The mask of the documents of a micro-batch, for the layers of a stage: it is in memory once for their backward.

    Args:
        make: of segment ids [b, s], the mask [b, 1, s, s].
    """

    def __init__(self, make: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._make, self._last = make, LastValueCache()

    @torch.compiler.disable  # what is kept from one call to the next is no part of a graph
    def of(self, segment_ids: torch.Tensor) -> torch.Tensor:
        """Return the mask of ``segment_ids``."""
        return self._last.of(segment_ids, partial(self._make, segment_ids))
