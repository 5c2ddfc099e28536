"""Caches of a layer for generation: keys and values, and the state of a recurrent mixer."""

from __future__ import annotations

import torch

from megatron.models.common.cache_slots import KVCacheSlots
from megatron.models.common.recurrent_cache import RecurrentCache


class LayerKVCache:
    """Keys and values of one layer: of its self-attention and, in an encoder-decoder model, of its cross-attention.

    ``recurrent`` is the cache of the layer's recurrent mixer.

    Multi-latent attention caches latents and the shared rotated keys instead, as the key and value of one head.

    Shapes:
        self-attention [b, a/t, capacity, d]; cross-attention [b, a/t, s_e, d]
    """

    def __init__(self, slots: KVCacheSlots) -> None:
        self.slots = slots
        self.recurrent = RecurrentCache(slots)
        self.self_attention: tuple[torch.Tensor, torch.Tensor] | None = None
        self.cross_attention: tuple[torch.Tensor, torch.Tensor] | None = None

    def update(self, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cache the keys and values of this pass; return the keys and values of all positions so far.

        Shapes:
            key, value [b, a/t, s, d]; keys and values may have different sizes
            output     2 x [b, a/t, stop, d]
        """
        if self.self_attention is None:
            batch_size, num_heads, length, head_size = key.shape
            self.self_attention = (
                key.new_zeros(batch_size, num_heads, self.slots.capacity, head_size),
                value.new_zeros(batch_size, num_heads, self.slots.capacity, value.shape[3]),
            )
            for cached, new in zip(self.self_attention, (key, value), strict=True):
                cached[:, :, :length] = new
            return key, value
        assert self.slots.positions is not None
        positions = self.slots.positions[:, None, :, None]  # [b, 1, s, 1]
        for cached, new in zip(self.self_attention, (key, value), strict=True):
            cached.scatter_(2, positions.expand_as(new), new)
        return self.self_attention[0][:, :, : self.slots.stop], self.self_attention[1][:, :, : self.slots.stop]

    def keep(self, rows: torch.Tensor) -> None:
        """Keep only the rows ``rows`` of the batch."""
        self.recurrent.keep(rows)
        if self.self_attention is not None:
            self.self_attention = self.self_attention[0][rows], self.self_attention[1][rows]
        if self.cross_attention is not None:
            self.cross_attention = self.cross_attention[0][rows], self.cross_attention[1][rows]
