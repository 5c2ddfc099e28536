"""torch's private names, all that tds uses: one function for each, and a line in tests/tds/test_deepspeed_contract.py.

``tds.p2p.host_copies`` stands apart: its process group is made of what torch calls on any of them.
"""

from __future__ import annotations

import json
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d, _swap_tensor_impl
from torch.distributed import distributed_c10d


def swap(parameter: torch.nn.Parameter, other: torch.nn.Parameter) -> None:
    """Let each of them have what the other one is, device and attributes of the tensor included."""
    _swap_tensor_impl(parameter, other)


def changes_of(tensor: torch.Tensor) -> int:
    """Return how often ``tensor`` was changed in place."""
    return tensor._version


def shares_memory(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether both lie in the same storage."""
    return bool(torch._C._is_alias_of(tensor, other))  # type: ignore[attr-defined]


def runs_backward() -> bool:
    """Return whether a backward runs now, in this thread."""
    return torch._C._current_graph_task_id() != -1


def backward_executes(node: Any) -> bool:
    """Return whether the backward that runs now has come or will come to this node of the graph."""
    return bool(torch._C._will_engine_execute_node(node))


def multiply_all(tensors: list[torch.Tensor], factor: float | torch.Tensor) -> None:
    """Multiply each tensor by ``factor``, in place, by one kernel."""
    torch._foreach_mul_(tensors, factor)


def abort(group: Any, device: torch.device) -> None:
    """End what ``group`` has on its way on ``device``; it is of no use afterwards."""
    group._get_backend(device).abort()


def norms_of_all(tensors: list[torch.Tensor], dtype: torch.dtype) -> list[torch.Tensor]:
    """Return the 2-norm of each tensor, summed in ``dtype``, by one kernel."""
    return list(torch._foreach_norm(tensors, 2, dtype=dtype))


def backend(group: Any, device: torch.device) -> Any:
    """Return what ``group`` sends tensors of ``device`` by."""
    return group._get_backend(device)


def default_timeout() -> timedelta | None:
    """Return the timeout of the default process group; None if its backend has none."""
    world = distributed_c10d._get_default_group()
    options = getattr(backend(world, world._device_types[0]), "options", None)
    return getattr(options, "_timeout", None)


def sends_from_host(group: Any) -> bool:
    """Return whether ``group`` sends what lies in the host's memory."""
    return torch.device("cpu") in group._device_types


def nccl_options(max_ctas: int, timeout: timedelta | None) -> Any:
    """Return options of NCCL: streams of high priority, at most ``max_ctas`` processors (0: as NCCL chooses)."""
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    if max_ctas:
        options.config.max_ctas = max_ctas
    if timeout is not None:
        options._timeout = timeout
    return options


def open_world(device: torch.device) -> None:
    """Open the default group's communicator, of which others are split. Collective."""
    if distributed_c10d._get_default_group().bound_device_id is None:
        dist.all_reduce(torch.zeros(1, device=device))


def split_world(
    ranks: list[list[int]], device: torch.device, backend: str, options: Any, timeout: timedelta | None
) -> Any:
    """Return the group of this rank among disjoint ``ranks``, or None; its communicator is split off the world's.

    torch splits only if the default group knows its device, which it may not have been told at its start. Collective.
    """
    world: Any = distributed_c10d._get_default_group()
    before, world.bound_device_id = world.bound_device_id, device
    try:
        of_devices = f"{device.type}:{backend}"
        return dist.split_group(split_ranks=ranks, timeout=timeout, pg_options=options, backend=of_devices)
    finally:
        world.bound_device_id = before


def set_timeout(group: Any, limit: timedelta) -> None:
    """Let the operations that ``group`` starts from now on end after ``limit``."""
    distributed_c10d._set_pg_timeout(limit, group)


def default_store() -> Any:
    """Return the store of the default process group.

    Raises:
        RuntimeError, ValueError: there is none.
    """
    return distributed_c10d._get_default_store()


def flight_record() -> dict[str, Any]:
    """Return what torch's flight recorder has of the collectives that this process has started."""
    recorder: Any = _distributed_c10d
    record: dict[str, Any] = json.loads(recorder._dump_fr_trace_json(includeCollectives=True, onlyActive=False))
    return record


def has_rates(scheduler: Any) -> bool:
    """Return whether a scheduler has set learning rates, so that it can tell the last ones."""
    return hasattr(scheduler, "_last_lr")
