"""Load embedding tables whose vocabulary size has changed.

The rows that both have are taken. Each further row is the mean of all saved rows, as Hewitt 2021 ("Initializing new
word embeddings for pretrained language models") recommends: a new token is then about as likely as the average one.
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
    """Tell whether a table has another number of rows than was saved, and is the same else."""
    return len(saved) == len(now) and saved[1:] == now[1:] and saved != now


def fill(target: torch.Tensor, shard: Shard, saved: tuple[int, ...], read: Callable[[Shard], torch.Tensor]) -> None:
    """Fill this rank's part of a table from one of another number of rows, a block of rows after another.

    Args:
        target: the part ``shard``, without padding; cut by rows, or whole.
        saved: shape of the table that was saved.
        read: returns a part of it.
    """
    if target.numel() == 0:
        return
    start = shard.start if shard.is_partitioned else 0
    known = min(max(saved[0] - start, 0), target.shape[0])
    for at in range(0, known, _ROWS_AT_ONCE):
        rows = min(_ROWS_AT_ONCE, known - at)
        target[at : at + rows].copy_(read(Shard(saved, 0, start + at, rows)))
    if known < target.shape[0]:
        target[known:].copy_(_mean(saved, read))


def _mean(saved: tuple[int, ...], read: Callable[[Shard], torch.Tensor]) -> torch.Tensor:
    """Return the mean of all rows, in fp64: the same on every rank."""
    total = torch.zeros(saved[1:], dtype=torch.float64)
    for start in range(0, saved[0], _ROWS_AT_ONCE):
        rows = min(_ROWS_AT_ONCE, saved[0] - start)
        total += read(Shard(saved, 0, start, rows)).double().sum(0)
    return total / saved[0]
