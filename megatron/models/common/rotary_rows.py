"""RotaryRows: rows of a Hugging Face weight in another order than ours, because rotary pairs are neighbours there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class RotaryRows:
    """Rotated rows of each head whose pairs are neighbours (0 and 1, 2 and 3) in Hugging Face files.

    In our weights the elements of a pair are half of the rotated rows apart (``megatron.ops.positions``). The rotated
    elements of queries and keys then have the same products, so the models are equal.

    Args:
        period: rows of a head.
        start: first rotated row of a head.
        length: number of rotated rows of a head.
    """

    period: int
    start: int
    length: int

    def to_ours(self, rows: torch.Tensor) -> torch.Tensor:
        """Return Hugging Face's rows [n, ...], of complete heads, in our order."""
        return rows[self._order(len(rows), rows.device)]

    def to_hf(self, rows: torch.Tensor) -> torch.Tensor:
        """Return our rows [n, ...], of complete heads, in Hugging Face's order."""
        return rows[self._order(len(rows), rows.device).argsort()]

    def enclosing(self, rows: slice) -> slice:
        """Return the smallest range of complete heads that contains ``rows``."""
        return slice(rows.start // self.period * self.period, -(-rows.stop // self.period) * self.period)

    def _order(self, num_rows: int, device: torch.device) -> torch.Tensor:
        """Return the Hugging Face index of each of our rows: int64 [num_rows]."""
        import torch  # takes half a second; a dry run that reads only settings does not need it

        if device.type == "meta":
            device = torch.device("cpu")
        by_head = torch.arange(num_rows, device=device).view(-1, self.period)
        rotated = by_head[:, self.start : self.start + self.length].clone()
        half = self.length // 2
        by_head[:, self.start : self.start + half] = rotated[:, 0::2]
        by_head[:, self.start + half : self.start + self.length] = rotated[:, 1::2]
        return by_head.flatten()
