"""This process's grid, the only global in the project, and Megatron's accessor functions for it.

Only scripts and ``megatron.training`` use the accessors; layers take their group as an argument. Accessors raise
RuntimeError before ``initialize_model_parallel`` has been called.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from megatron.mpu.context_parallel import split_batch
from megatron.mpu.data import broadcast_data as _broadcast_data
from megatron.mpu.groups import Grid, Group, build_grid, single_grid
from megatron.mpu.topology import Topology

_grid: Grid | None = None
_device = torch.device("cpu")


def initialize_model_parallel(
    tensor: int = 1,
    pipe: int = 1,
    device: torch.device | None = None,
    timeout: timedelta | None = None,
    context: int = 1,
    expert: int = 1,
    expert_tensor: int = 0,
    context_inner: int = 1,
) -> Grid:
    """Build and store the grid over all ranks in the default process group. Collective.

    Args:
        device: device for this rank's tensors; None: the CPU.
        timeout: timeout of collectives on the new groups; None: torch's default.
        expert, expert_tensor: number of ranks that share a layer's experts, and number of tensor ranks that shard each
            expert (0: all), see ``Topology``.
        context_inner: number of consecutive context ranks that exchange heads in hierarchical context parallelism.

    Raises:
        ValueError: the sizes do not fit the world size, see ``Topology.from_world_size``.
    """
    global _grid, _device
    _device = device or torch.device("cpu")
    if dist.is_initialized():
        topology = Topology.from_world_size(
            dist.get_world_size(), tensor, max(pipe, 1), context, expert, expert_tensor, context_inner
        )
        _grid = build_grid(topology, dist.get_rank(), timeout, is_on_host=_device.type == "cpu")
    else:
        Topology.from_world_size(1, tensor, max(pipe, 1), context, expert, expert_tensor, context_inner)
        _grid = single_grid()
    return _grid


def get_grid() -> Grid:
    """Return this process's grid.

    Raises:
        RuntimeError: ``initialize_model_parallel`` has not been called in this process.
    """
    if _grid is None:
        raise RuntimeError("the grid of ranks is not initialized. Call pretrain() or initialize_model_parallel() first")
    return _grid


def model_parallel_is_initialized() -> bool:
    """Return True if the grid has been built."""
    return _grid is not None


def destroy_model_parallel() -> None:
    """Discard the grid."""
    global _grid
    _grid = None


def _make_accessor(axis: str, attribute: str) -> Any:
    """Make an accessor function for ``attribute`` of the grid's group ``axis``."""

    def read() -> Any:
        group: Group = getattr(get_grid(), axis)
        return getattr(group, attribute)

    read.__doc__ = f"Return the {attribute} of the {axis} group."
    return read


def _make_data_accessor(attribute: str) -> Any:
    """Make an accessor function for ``attribute`` of the data group, or of the data x context group."""

    def read(with_context_parallel: bool = False) -> Any:
        grid = get_grid()
        return getattr(grid.data_context if with_context_parallel else grid.data, attribute)

    read.__doc__ = f"Return the {attribute} of the data group, or of all ranks with the same weights: data x context."
    return read


get_tensor_model_parallel_group = get_model_parallel_group = _make_accessor("tensor", "handle")
get_tensor_model_parallel_rank = get_model_parallel_rank = _make_accessor("tensor", "rank")
get_tensor_model_parallel_world_size = get_model_parallel_world_size = _make_accessor("tensor", "size")
get_pipe_parallel_group = get_pipeline_model_parallel_group = _make_accessor("pipe", "handle")
get_pipe_parallel_rank = get_pipeline_model_parallel_rank = _make_accessor("pipe", "rank")
get_pipe_parallel_world_size = get_pipeline_model_parallel_world_size = _make_accessor("pipe", "size")
get_data_parallel_group = _make_data_accessor("handle")
get_data_parallel_rank = _make_data_accessor("rank")
get_data_parallel_world_size = _make_data_accessor("size")
get_context_parallel_group = _make_accessor("context", "handle")
get_context_parallel_rank = _make_accessor("context", "rank")
get_expert_model_parallel_group = _make_accessor("expert", "handle")
get_expert_model_parallel_rank = _make_accessor("expert", "rank")
get_expert_model_parallel_world_size = _make_accessor("expert", "size")
get_context_parallel_world_size = _make_accessor("context", "size")


def get_tensor_model_parallel_src_rank() -> int:
    """Return the global rank of the tensor group's first member, which reads the data."""
    return get_grid().tensor.ranks[0]


def get_context_parallel_global_ranks() -> list[int]:
    """Return the context group's global ranks."""
    return list(get_grid().context.ranks)


def is_pipeline_first_stage() -> bool:
    """Return True if this rank runs the first pipeline stage."""
    return get_grid().pipe.rank == 0


def is_pipeline_last_stage() -> bool:
    """Return True if this rank runs the last pipeline stage."""
    grid = get_grid()
    return grid.pipe.rank == grid.pipe.size - 1


def broadcast_data(
    keys: Iterable[str], data: Mapping[str, torch.Tensor] | None, dtype: torch.dtype | str
) -> dict[str, torch.Tensor]:
    """Broadcast ``data[key]`` for each key over this process's tensor group, to its device. Collective.

    This variant is for scripts; ``megatron.mpu.data.broadcast_data`` takes the group and the device as arguments.

    Args:
        dtype: a ``torch.dtype``, or its name such as "int64" for scripts that do not import torch.
    """
    torch_dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    return _broadcast_data(keys, data, torch_dtype, get_grid().tensor, _device, get_grid().tensor_host)


def get_batch_on_this_cp_rank(
    batch: Mapping[str, torch.Tensor | None], cp_group: Group | None = None
) -> dict[str, torch.Tensor | None]:
    """Select this rank's sequence chunks in ``batch``; unchanged without context parallelism.

    Tensors [b, s, ...] are split; tensors with fewer dimensions and None are unchanged. The name is Megatron-LM's.
    """
    return split_batch(batch, cp_group or get_grid().context)
