"""Whole tensors from the slices of tensor ranks, rows of query, key and value in our order.

Megatron-LM wrote the rows of a rank's query, key and value in three orders; the version in a file says which:

| version | rows | |
|---|---|---|
| 0, CPM-1 | [3, heads, d] | all queries, all keys, all values |
| 1 | [heads, d, 3] | |
| 2 and later | [heads, 3, d] | as ours |

"heads" are those of the rank, so each slice is put in order before the slices are joined.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatron.checkpoint.legacy.names import cut_dim, heads_parts
from megatron.errors import CheckpointError

ORDERS = {"3-heads-d": 0.0, "heads-d-3": 1.0, "heads-3-d": 2.0}
"""Name of an order -> the first version that has it."""


def order_of(version: float) -> str:
    """Return the order of rows that files of ``version`` have."""
    return [name for name, first in ORDERS.items() if version >= first][-1]


def merged(name: str, slices: Sequence[torch.Tensor], order: str, num_heads: int) -> tuple[torch.Tensor, float]:
    """Return the whole tensor of our name ``name``, and by how much copies of an uncut one differ from the first.

    Raises:
        CheckpointError: the rows of query, key and value are no multiple of the heads.
    """
    parts, dim = heads_parts(name), cut_dim(name)
    if parts > 1:
        slices = [_ordered(name, one, parts, order, num_heads, len(slices)) for one in slices]
    if dim is not None and len(slices) > 1:
        return torch.cat(list(slices), dim), 0.0
    first = slices[0]
    differs = [one for one in slices[1:] if not torch.equal(one, first)]
    return first, max((float((one.double() - first.double()).abs().max()) for one in differs), default=0.0)


def _ordered(name: str, rows: torch.Tensor, parts: int, order: str, num_heads: int, ranks: int) -> torch.Tensor:
    """Return the rows of one rank as [heads, parts, d]."""
    heads, left = divmod(num_heads, ranks)
    if left or rows.shape[0] % (parts * max(heads, 1)):
        raise CheckpointError(
            f"{name}: {rows.shape[0]} rows on each of {ranks} tensor ranks cannot be {parts} x {num_heads} heads; "
            "check --num-attention-heads"
        )
    d = rows.shape[0] // (parts * heads)
    rest = tuple(rows.shape[1:])
    if order == "3-heads-d":
        blocks = rows.reshape(parts, heads, d, *rest).transpose(0, 1)
    elif order == "heads-d-3":
        blocks = rows.reshape(heads, d, parts, *rest).transpose(1, 2)
    else:
        return rows
    return blocks.reshape(rows.shape)
