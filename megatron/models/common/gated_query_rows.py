"""GatedQueryRows: rows of queries and output gates, which alternate by head in Hugging Face files."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron.models.common.row_order import RowOrder

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class GatedQueryRows(RowOrder):
    """Rows of a query projection that also computes the output gate.

    Hugging Face files have the query and the gate of head 0, then those of head 1. Our weights have the queries of all
    heads of a query group, then their gates.

    Args:
        period: rows of the queries and gates of a query group.
        head_size: size of a head.
    """

    period: int
    head_size: int

    def _sort_periods(self, indices: torch.Tensor) -> torch.Tensor:
        by_head = indices.unflatten(1, (-1, 2, self.head_size))  # [groups, heads, query or gate, d]
        return by_head.transpose(1, 2).flatten(1)
