"""Group of all ranks, for tests of a single axis, and weights filled from logical tensors."""

from __future__ import annotations

import torch
import torch.distributed as dist

from megatron.mpu.groups import SINGLE, Group
from megatron.mpu.shard import shard_of


def group_of_all_ranks(rank: int, size: int) -> Group:
    """Return the group of all ranks."""
    return SINGLE if size == 1 else Group(tuple(range(size)), rank, dist.group.WORLD)


def random_tensor(seed: int, *shape: int) -> torch.Tensor:
    """Return normally distributed values in fp64 that depend on ``seed`` only."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def fill_shard(parameter: torch.Tensor, weight: torch.Tensor) -> None:
    """Copy this rank's shard of the logical tensor ``weight`` into ``parameter``; padding is zero."""
    with torch.no_grad():
        parameter.zero_()
        shard = shard_of(parameter)
        shard.unpadded(parameter).copy_(shard.narrow(weight))
