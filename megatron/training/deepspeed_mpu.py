"""The rank grid as the ``mpu`` object for the DeepSpeed engine."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from megatron.mpu.groups import Grid, Group


class DeepSpeedMpu:
    """The methods that ``deepspeed.initialize(mpu=...)`` calls. Construction is collective.

    Data and context parallelism are one axis for DeepSpeed. DeepSpeed interprets a missing handle as the world group,
    so a process group is created even for a single rank.
    """

    def __init__(self, grid: Grid) -> None:
        self._grid = grid
        self._data = _process_group(grid, grid.data_context)
        self._tensor = _process_group(grid, grid.tensor)

    def get_data_parallel_group(self) -> Any:
        return self._data

    def get_data_parallel_rank(self) -> int:
        return self._grid.data_context.rank

    def get_data_parallel_world_size(self) -> int:
        return self._grid.data_context.size

    def get_model_parallel_group(self) -> Any:
        return self._tensor

    def get_model_parallel_rank(self) -> int:
        return self._grid.tensor.rank

    def get_model_parallel_world_size(self) -> int:
        return self._grid.tensor.size

    get_tensor_model_parallel_group = get_model_parallel_group
    get_tensor_model_parallel_rank = get_model_parallel_rank
    get_tensor_model_parallel_world_size = get_model_parallel_world_size


def _process_group(grid: Grid, group: Group) -> Any:
    """Return the group's process group; for a single rank, create one. Collective."""
    if group.handle is not None:
        return group.handle
    local_handle = None
    for rank in range(grid.topology.world_size):
        handle = dist.new_group([rank])
        if rank == grid.rank:
            local_handle = handle
    return local_handle
