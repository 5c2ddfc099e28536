"""A grid of several ranks in one process, whose process groups are torch's fake ones."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron.models.common.parallel_context import ParallelContext
from megatron.mpu.groups import Grid, build_grid
from megatron.mpu.random import DropoutStreams
from megatron.mpu.topology import Topology


@contextmanager
def fake_grid(topology: Topology, rank: int) -> Iterator[Grid]:
    """Build the grid of ``rank``; its groups have all their ranks, but communicate with none of them."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=topology.world_size)
    new_group = dist.new_group

    def new_fake_group(*args: Any, **kwargs: Any) -> Any:
        return new_group(*args, **{**kwargs, "backend": "fake"})

    try:
        with patch.object(dist, "new_group", new_fake_group):
            grid = build_grid(topology, rank)
        yield grid
    finally:
        dist.destroy_process_group()


def make_parallel_context(grid: Grid, **options: Any) -> ParallelContext:
    """Return the ``ParallelContext`` of a rank; ``options`` are further fields of it."""
    streams = DropoutStreams(data=grid.data, tensor=grid.tensor)
    groups = {"context": grid.context, "expert": grid.expert, "expert_tensor": grid.expert_tensor}
    return ParallelContext(grid.tensor, streams, **groups, **options)
