"""RotaryRows: rows of a Hugging Face weight in another order than ours, because rotary pairs are neighbours there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron.models.common.row_order import RowOrder

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class RotaryRows(RowOrder):
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

    def _sort_periods(self, indices: torch.Tensor) -> torch.Tensor:
        rotated = indices[:, self.start : self.start + self.length].clone()
        half = self.length // 2
        indices[:, self.start : self.start + half] = rotated[:, 0::2]
        indices[:, self.start + half : self.start + self.length] = rotated[:, 1::2]
        return indices
