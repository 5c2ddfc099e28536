"""Positions of the tokens of a forward pass with caches."""

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
