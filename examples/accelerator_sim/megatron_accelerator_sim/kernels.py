"""The device's kernels: every operation of torch on it is the CPU's, on the same memory.

torch asks a new device for few operations by name: those that make memory and views of it, and copies. Everything else
comes here as a whole, by the fallback of the device's dispatch key. A device of hardware has kernels of its own there.
"""

from __future__ import annotations

import types
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from megatron_accelerator_sim.memory import on_device, on_host

KEY = "PrivateUse1"
VIEWS = ("as_strided", "view", "_reshape_alias", "unfold")
"""Views: torch's own functions make them, without a look at the memory. All other views are made of these."""
WHOLE = ("native_layer_norm",)
"""Operations that torch would otherwise do in several steps on a device that it does not know."""
_libraries: list[torch.library.Library] = []


def install(name: str) -> None:
    """Let torch have a device of this name; once in a process, before its first backward. A second call does nothing.

    torch starts a thread for each device at the first backward, and none for those that come later.
    """
    if _libraries:
        return
    _setup_privateuseone_for_python_backend(name, backend_module=_module(name))
    any_operation = torch.library.Library("_", "IMPL")
    any_operation.fallback(_on_the_host, KEY)
    aten, collectives = torch.library.Library("aten", "IMPL"), torch.library.Library("c10d", "IMPL")
    _libraries.extend((any_operation, aten, collectives))
    for operation, kernel in _MEMORY.items():
        aten.impl(operation, kernel, KEY)
    for view in VIEWS:
        aten.impl(view, _as_the_cpu_views(getattr(torch.ops.aten, view).default), KEY)
    for operation in WHOLE:
        aten.impl(operation, _redirected(getattr(torch.ops.aten, operation).default), KEY)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that torch's own kernels, which look for a backend of the device, go
        for operation in _collectives():
            kernel = _redirected(getattr(torch.ops.c10d, operation).default)
            collectives.impl(operation, kernel, KEY, allow_override=True)
    _check_backward(name)


def _check_backward(name: str) -> None:
    """Raise where this process has run a backward before: torch has no thread for the device then."""
    try:
        torch.ones(1, device=name, requires_grad=True).sum().backward()
    except RuntimeError as error:
        raise RuntimeError(
            f"the device {name} must be made ready before the first backward of a process, got one that has run some. "
            "Import the plug-in at the top of the script, and call configure_device() or pretrain() before anything "
            "else"
        ) from error


def _module(name: str) -> Any:
    """Return what torch shows as ``torch.<name>``. There is one device, and the generator is the CPU's."""
    module = types.ModuleType(f"torch.{name}")
    module.is_available = lambda: True
    module.is_initialized = lambda: True
    module.device_count = lambda: 1
    module.current_device = lambda: 0
    module.set_device = lambda device: None
    module.synchronize = lambda device=None: None
    module._is_in_bad_fork = lambda: False
    module.manual_seed_all = lambda seed: None
    module.get_rng_state = lambda device=None: torch.get_rng_state()
    module.set_rng_state = lambda state, device=None: torch.set_rng_state(state)
    module.get_amp_supported_dtype = lambda: [torch.bfloat16]
    return module


def _on_the_host(operation: Any, *args: Any, **kwargs: Any) -> Any:
    """Run ``operation`` on the host's views of its arguments; return the device's view of what comes out.

    An argument that comes back, as from an operation in place, is given back as it was.
    """
    given: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # identity of the host's view -> device's, host's

    def to_host(value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.device.type != "cpu":
            host = on_host(value) if value.numel() else torch.empty(value.shape, dtype=value.dtype, device="cpu")
            given[id(host)] = value, host
            return host
        if isinstance(value, torch.Tensor) and value.dim():  # a number may come from the host, as with CUDA
            raise RuntimeError(
                f"all tensors of {operation} must be on the device, got one of {value.shape} on the host"
            )
        return torch.device("cpu") if isinstance(value, torch.device) else value

    def to_device(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        return given[id(value)][0] if id(value) in given else on_device(value)

    args, kwargs = pytree.tree_map(to_host, (_with_tensors(operation, args), kwargs))
    results = operation(*args, **kwargs)
    for value, host in given.values():
        if host.shape != value.shape:  # an empty tensor that was given to be filled
            _take(value, on_device(host))
    return pytree.tree_map(to_device, results)


def _with_tensors(operation: Any, args: tuple[Any, ...]) -> list[Any]:
    """Return ``args`` with a tensor for each number where ``operation`` takes one: torch hands over the number."""
    return [
        torch.scalar_tensor(value, dtype=torch.tensor(value).dtype)
        if isinstance(value, (bool, int, float)) and argument.type.kind() == "TensorType"
        else value
        for value, argument in zip(args, operation._schema.arguments, strict=False)
    ]


def _take(target: torch.Tensor, source: torch.Tensor) -> None:
    """Let ``target`` be what ``source`` is: its memory and its shape."""
    place = (source.untyped_storage(), source.storage_offset(), source.shape, source.stride())
    torch.ops.aten.set_.source_Storage_storage_offset._op_dk(torch._C.DispatchKey.CPU, target, *place)


def _redirected(operation: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: _on_the_host(operation, *args, **kwargs)


def _as_the_cpu_views(operation: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: operation._op_dk(torch._C.DispatchKey.CPU, *args, **kwargs)


def _collectives() -> list[str]:
    """Return the names of the collectives that torch lets a device have kernels for."""
    names = torch._C._dispatch_get_registrations_for_dispatch_key(KEY)
    return sorted(name.removeprefix("c10d::") for name in names if name.startswith("c10d::"))


def _empty(size: Any, *, dtype: Any = None, memory_format: Any = None, **_: Any) -> torch.Tensor:
    memory_format = torch.contiguous_format if memory_format is None else memory_format
    return on_device(torch.empty(size, dtype=dtype, device="cpu", memory_format=memory_format))


def _empty_strided(size: Any, stride: Any, *, dtype: Any = None, **_: Any) -> torch.Tensor:
    return on_device(torch.empty_strided(size, stride, dtype=dtype, device="cpu"))


def _copy_from(source: torch.Tensor, target: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    ends = [end if end.device.type == "cpu" else on_host(end) for end in (target, source)]
    ends[0].copy_(ends[1])
    return target


def _resize(tensor: torch.Tensor, size: Any, *, memory_format: Any = None) -> torch.Tensor:
    """Give the tensor other memory of that shape, which begins with what it holds now."""
    held, other = on_host(tensor.contiguous()).flatten(), torch.empty(size, dtype=tensor.dtype, device="cpu")
    number = min(held.numel(), other.numel())
    other.flatten()[:number].copy_(held[:number])
    _take(tensor, on_device(other))
    return tensor


_MEMORY = {
    "empty.memory_format": _empty,
    "empty_strided": _empty_strided,
    "resize_": _resize,
    "_copy_from": _copy_from,
}
