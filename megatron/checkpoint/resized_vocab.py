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


_BLOCK_ROWS = 4096


def is_resized(saved_shape: tuple[int, ...], current_shape: tuple[int, ...]) -> bool:
    """Check if the table's shape differs from the saved shape only in the row count."""
    return (
        len(saved_shape) == len(current_shape) and saved_shape[1:] == current_shape[1:] and saved_shape != current_shape
    )


def fill_resized(
    target: torch.Tensor, shard: Shard, saved_shape: tuple[int, ...], read_shard: Callable[[Shard], torch.Tensor]
) -> None:
    """Fill this rank's shard of a table from a saved table with another row count, one block of rows at a time.

    Args:
        target: the local tensor of ``shard``, without padding; partitioned by rows or not at all.
        saved_shape: the saved table's shape.
        read_shard: reads a shard from the saved table.
    """
    if target.numel() == 0:
        return
    start = shard.start if shard.is_partitioned else 0
    num_saved_rows = min(max(saved_shape[0] - start, 0), target.shape[0])
    for row in range(0, num_saved_rows, _BLOCK_ROWS):
        num_rows = min(_BLOCK_ROWS, num_saved_rows - row)
        target[row : row + num_rows].copy_(read_shard(Shard(saved_shape, 0, start + row, num_rows)))
    if num_saved_rows < target.shape[0]:
        target[num_saved_rows:].copy_(_mean_row(saved_shape, read_shard))


def _mean_row(saved_shape: tuple[int, ...], read_shard: Callable[[Shard], torch.Tensor]) -> torch.Tensor:
    """Compute the mean of all saved rows in fp64; it is the same on every rank."""
    total = torch.zeros(saved_shape[1:], dtype=torch.float64)
    for start in range(0, saved_shape[0], _BLOCK_ROWS):
        num_rows = min(_BLOCK_ROWS, saved_shape[0] - start)
        total += read_shard(Shard(saved_shape, 0, start, num_rows)).double().sum(0)
    return total / saved_shape[0]
