"""Keys and values of earlier positions, cached during generation."""

from __future__ import annotations

from dataclasses import dataclass

import torch


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
