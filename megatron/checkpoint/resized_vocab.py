"""Load embedding tables whose vocabulary size has changed.

Rows that exist in both tables are copied. Each additional row is initialized to the mean of all saved rows, as
recommended by Hewitt 2021 ("Initializing new word embeddings for pretrained language models"): a new token then starts
with about average probability.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from megatron.mpu.shard import Shard

if TYPE_CHECKING:
    pass


_ROWS_AT_ONCE = 4096


def is_resized(saved: tuple[int, ...], now: tuple[int, ...]) -> bool:
    """Return True if the table's shape differs from the saved one only in the number of rows."""
    return len(saved) == len(now) and saved[1:] == now[1:] and saved != now


def fill(target: torch.Tensor, shard: Shard, saved: tuple[int, ...], read: Callable[[Shard], torch.Tensor]) -> None:
    """Fill this rank's shard of a table from a saved table with another number of rows, one block of rows at a time.

    Args:
        target: the local tensor of ``shard``, without padding; partitioned by rows or not at all.
        saved: shape of the saved table.
        read: returns a shard of the saved table.
    """
    if target.numel() == 0:
        return
    start = shard.start if shard.is_partitioned else 0
    num_saved_rows = min(max(saved[0] - start, 0), target.shape[0])
    for row in range(0, num_saved_rows, _ROWS_AT_ONCE):
        num_rows = min(_ROWS_AT_ONCE, num_saved_rows - row)
        target[row : row + num_rows].copy_(read(Shard(saved, 0, start + row, num_rows)))
    if num_saved_rows < target.shape[0]:
        target[num_saved_rows:].copy_(_mean(saved, read))


def _mean(saved: tuple[int, ...], read: Callable[[Shard], torch.Tensor]) -> torch.Tensor:
    """Return the mean of all saved rows, computed in fp64; it is the same on every rank."""
    total = torch.zeros(saved[1:], dtype=torch.float64)
    for start in range(0, saved[0], _ROWS_AT_ONCE):
        num_rows = min(_ROWS_AT_ONCE, saved[0] - start)
        total += read(Shard(saved, 0, start, num_rows)).double().sum(0)
    return total / saved[0]
