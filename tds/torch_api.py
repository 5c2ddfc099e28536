"""All of torch's private names that tds uses.

Each has a function here and a line in tests/tds/test_deepspeed_contract.py.

The exception is ``tds.p2p.host_copies``, whose process group implements methods that torch calls.
"""

from __future__ import annotations

import inspect
import json
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d, _swap_tensor_impl
from torch.distributed import distributed_c10d


def swap(parameter: torch.nn.Parameter, other: torch.nn.Parameter) -> None:
    """Swap the contents of two parameters, including device and tensor attributes."""
    _swap_tensor_impl(parameter, other)


def version_of(tensor: torch.Tensor) -> int:
    """Return the version counter of ``tensor``, which counts in-place changes."""
    return tensor._version


def base_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the tensor that ``tensor`` is a view of, or None."""
    return tensor._base


def shares_memory(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """Return True if both tensors have the same storage."""
    return bool(torch._C._is_alias_of(tensor, other))  # type: ignore[attr-defined]


def runs_backward() -> bool:
    """Return True if a backward pass is running in this thread."""
    return torch._C._current_graph_task_id() != -1


def backward_executes(node: Any) -> bool:
    """Return True if the running backward pass has executed or will execute this node of the graph."""
    return bool(torch._C._will_engine_execute_node(node))


def multiply_all(tensors: list[torch.Tensor], factor: float | torch.Tensor) -> None:
    """Multiply each tensor by ``factor`` in place with one kernel."""
    torch._foreach_mul_(tensors, factor)


def abort(group: Any, device: torch.device) -> None:
    """Abort all running operations of ``group`` on ``device``; the group is unusable afterwards."""
    group._get_backend(device).abort()


def norms_of_all(tensors: list[torch.Tensor], dtype: torch.dtype) -> list[torch.Tensor]:
    """Return the 2-norm of each tensor, computed in ``dtype`` with one kernel."""
    return list(torch._foreach_norm(tensors, 2, dtype=dtype))


def backend(group: Any, device: torch.device) -> Any:
    """Return the backend of ``group`` for tensors on ``device``."""
    return group._get_backend(device)


def default_timeout() -> timedelta | None:
    """Return the timeout of the default process group; None if its backend has none."""
    world = distributed_c10d._get_default_group()
    options = getattr(backend(world, world._device_types[0]), "options", None)
    return getattr(options, "_timeout", None)


def sends_from_host(group: Any) -> bool:
    """Return True if ``group`` can send CPU tensors."""
    return torch.device("cpu") in group._device_types


def nccl_options(max_ctas: int, timeout: timedelta | None) -> Any:
    """Create NCCL options with high-priority streams and at most ``max_ctas`` CTAs (0: NCCL's default)."""
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    if max_ctas:
        options.config.max_ctas = max_ctas
    if timeout is not None:
        options._timeout = timeout
    return options


def open_world(device: torch.device) -> None:
    """Initialise the default group's communicator, which other communicators are split from. Collective."""
    if distributed_c10d._get_default_group().bound_device_id is None:
        dist.all_reduce(torch.zeros(1, device=device))


def split_world(
    ranks: list[list[int]], device: torch.device, backend: str, options: Any, timeout: timedelta | None
) -> Any:
    """Split the default group into groups of disjoint ``ranks``; return this rank's group, or None. Collective.

    torch requires that the default group has a bound device. It may have been initialised without one, so this function
    binds ``device`` during the call.
    """
    world: Any = distributed_c10d._get_default_group()
    previous, world.bound_device_id = world.bound_device_id, device
    try:
        arguments: dict[str, Any] = {"split_ranks": ranks, "timeout": timeout, "pg_options": options}
        if "backend" in inspect.signature(dist.split_group).parameters:  # torch 2.12; before, groups inherit backends
            arguments["backend"] = f"{device.type}:{backend}"
        return dist.split_group(**arguments)
    finally:
        world.bound_device_id = previous


def set_timeout(group: Any, limit: timedelta) -> None:
    """Set the timeout of all further operations of ``group``."""
    distributed_c10d._set_pg_timeout(limit, group)


def default_store() -> Any:
    """Return the default process group's store.

    Raises:
        RuntimeError, ValueError: the group has no store, or there is no default group.
    """
    return distributed_c10d._get_default_store()


def flight_record() -> dict[str, Any]:
    """Read torch's flight recorder: the collectives that this process has started."""
    recorder: Any = _distributed_c10d
    record: dict[str, Any] = json.loads(recorder._dump_fr_trace_json(includeCollectives=True, onlyActive=False))
    return record


def has_learning_rates(scheduler: Any) -> bool:
    """Return True if a scheduler has set learning rates, so that ``get_last_lr`` works."""
    return hasattr(scheduler, "_last_lr")
