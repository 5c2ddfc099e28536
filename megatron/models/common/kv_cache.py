"""Caches of keys and values for generation."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass
class KVCacheSlots:
    """Slots of the current pass in the caches of all layers: the slot of a token is its position.

    Rows may be at different positions. Slots after a row's newest token may contain stale values: the row's queries do
    not attend to them, and later tokens overwrite them.

    Args:
        capacity: maximum number of positions in a row.
        positions: [b, s], positions of this pass; None before the first pass.
        stop: one more than the largest position so far.
        mask: bool [b, 1, s, stop], True where a query may attend; None in the first pass, where all rows start at 0 and
            attention is causal.
        lengths: [b], number of tokens of each row in this pass, which is padded at the end; None: no row has padding.
    """

    capacity: int
    positions: torch.Tensor | None = None
    stop: int = 0
    mask: torch.Tensor | None = None
    lengths: torch.Tensor | None = None

    def advance(self, positions: torch.Tensor, lengths: torch.Tensor | None = None) -> None:
        """Start a pass over tokens at ``positions`` [b, s]; in the first pass these are 0 ... s-1 in each row."""
        self.lengths = lengths
        is_first = self.positions is None
        self.positions = positions
        self.stop = int(positions.max()) + 1
        slots = torch.arange(self.stop, device=positions.device)
        self.mask = None if is_first else (slots <= positions.unsqueeze(2)).unsqueeze(1)


class LayerKVCache:
    """Keys and values of one layer: of its self-attention and, in an encoder-decoder model, of its cross-attention.

    Multi-latent attention caches latents and the shared rotated keys instead, as the key and value of one head.

    Shapes:
        self-attention [b, a/t, capacity, d]; cross-attention [b, a/t, s_e, d]
    """

    def __init__(self, slots: KVCacheSlots) -> None:
        self.slots = slots
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
        if self.self_attention is not None:
            self.self_attention = self.self_attention[0][rows], self.self_attention[1][rows]
        if self.cross_attention is not None:
            self.cross_attention = self.cross_attention[0][rows], self.cross_attention[1][rows]
