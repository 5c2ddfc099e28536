"""The device's kernels: each torch operation on the device runs the CPU's operation on the same memory.

A new device must register a few operations by name: allocation, views and copies. All other operations are handled by
the fallback of the device's dispatch key. A real device would register its own kernels instead.
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
"""View operations that torch implements without accessing the memory. All other views are composed of these."""
NOT_DECOMPOSED = ("native_layer_norm",)
"""Operations that torch would otherwise decompose on an unknown device."""
_libraries: list[torch.library.Library] = []


def install(name: str) -> None:
    """Register a torch device ``name``; must be called before the first backward. A second call does nothing.

    torch starts an autograd thread for each known device at the first backward, but not for devices added later.
    """
    if _libraries:
        return
    _setup_privateuseone_for_python_backend(name, backend_module=_module(name))
    any_operation = torch.library.Library("_", "IMPL")
    any_operation.fallback(_run_on_host, KEY)
    aten, collectives = torch.library.Library("aten", "IMPL"), torch.library.Library("c10d", "IMPL")
    _libraries.extend((any_operation, aten, collectives))
    for operation, kernel in _MEMORY.items():
        aten.impl(operation, kernel, KEY)
    for view in VIEWS:
        aten.impl(view, _view_kernel(getattr(torch.ops.aten, view).default), KEY)
    for operation in NOT_DECOMPOSED:
        aten.impl(operation, _host_kernel(getattr(torch.ops.aten, operation).default), KEY)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that its kernels, which need a device backend, are overridden
        for operation in _collectives():
            kernel = _host_kernel(getattr(torch.ops.c10d, operation).default)
            collectives.impl(operation, kernel, KEY, allow_override=True)
    _check_backward(name)


def _check_backward(name: str) -> None:
    """Raise RuntimeError if the process has already run a backward, because torch then has no thread for the device."""
    try:
        torch.ones(1, device=name, requires_grad=True).sum().backward()
    except RuntimeError as error:
        raise RuntimeError(
            f"the device {name} must be initialized before the first backward pass of the process, which has already "
            "run one. Import the plug-in at the top of the script, and call configure_device() or pretrain() first"
        ) from error


def _module(name: str) -> Any:
    """Return the module ``torch.<name>``. There is one device, and it uses the CPU's random generator."""
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


def _run_on_host(operation: Any, *args: Any, **kwargs: Any) -> Any:
    """Run ``operation`` on host views of its arguments and return device views of the results.

    An in-place operation returns one of its arguments; in this case, the original tensor is returned.
    """
    tensors: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # id of the host view -> (device tensor, host view)

    def to_host(value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.device.type != "cpu":
            host_tensor = on_host(value) if value.numel() else torch.empty(value.shape, dtype=value.dtype, device="cpu")
            tensors[id(host_tensor)] = value, host_tensor
            return host_tensor
        if isinstance(value, torch.Tensor) and value.dim():  # scalar tensors may be on the host, as with CUDA
            raise RuntimeError(
                f"all tensors of {operation} must be on the device, got a tensor {value.shape} on the host"
            )
        return torch.device("cpu") if isinstance(value, torch.device) else value

    def to_device(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        return tensors[id(value)][0] if id(value) in tensors else on_device(value)

    args, kwargs = pytree.tree_map(to_host, (_with_tensors(operation, args), kwargs))
    results = operation(*args, **kwargs)
    for value, host_tensor in tensors.values():
        if host_tensor.shape != value.shape:  # an empty output tensor was resized
            _share_storage(value, on_device(host_tensor))
    return pytree.tree_map(to_device, results)


def _with_tensors(operation: Any, args: tuple[Any, ...]) -> list[Any]:
    """Return ``args`` with numbers replaced by tensors where ``operation`` expects tensors; torch passes numbers.

    Next to fp64 tensors a number keeps all of its bits. Otherwise it has torch's default dtype, so that the product of
    integers and a number is fp32.
    """
    is_fp64 = any(isinstance(value, torch.Tensor) and value.dtype == torch.float64 for value in args)
    return [
        torch.scalar_tensor(
            value, dtype=torch.float64 if is_fp64 and isinstance(value, float) else torch.tensor(value).dtype
        )
        if isinstance(value, (bool, int, float)) and argument.type.kind() == "TensorType"
        else value
        for value, argument in zip(args, operation._schema.arguments, strict=False)
    ]


def _share_storage(target: torch.Tensor, source: torch.Tensor) -> None:
    """Make ``target`` share the memory and the shape of ``source``."""
    layout = (source.untyped_storage(), source.storage_offset(), source.shape, source.stride())
    torch.ops.aten.set_.source_Storage_storage_offset._op_dk(torch._C.DispatchKey.CPU, target, *layout)


def _host_kernel(operation: Any) -> Callable[..., Any]:
    """Return a kernel that runs ``operation`` on the host."""
    return lambda *args, **kwargs: _run_on_host(operation, *args, **kwargs)


def _view_kernel(operation: Any) -> Callable[..., Any]:
    """Return a kernel that calls the CPU's implementation of a view operation on the device tensor itself."""
    return lambda *args, **kwargs: operation._op_dk(torch._C.DispatchKey.CPU, *args, **kwargs)


def _collectives() -> list[str]:
    """Return the names of the collectives that torch implements for the device's dispatch key."""
    names = torch._C._dispatch_get_registrations_for_dispatch_key(KEY)
    return sorted(name.removeprefix("c10d::") for name in names if name.startswith("c10d::"))


def _empty(size: Any, *, dtype: Any = None, memory_format: Any = None, **_: Any) -> torch.Tensor:
    memory_format = torch.contiguous_format if memory_format is None else memory_format
    return on_device(torch.empty(size, dtype=dtype, device="cpu", memory_format=memory_format))


def _empty_strided(size: Any, stride: Any, *, dtype: Any = None, **_: Any) -> torch.Tensor:
    return on_device(torch.empty_strided(size, stride, dtype=dtype, device="cpu"))


def _copy_from(source: torch.Tensor, target: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    host_tensors = [tensor if tensor.device.type == "cpu" else on_host(tensor) for tensor in (target, source)]
    host_tensors[0].copy_(host_tensors[1])
    return target


def _resize(tensor: torch.Tensor, size: Any, *, memory_format: Any = None) -> torch.Tensor:
    """Resize the tensor: allocate new memory and copy as much of the old content as fits."""
    old, new = on_host(tensor.contiguous()).flatten(), torch.empty(size, dtype=tensor.dtype, device="cpu")
    num_copied = min(old.numel(), new.numel())
    new.flatten()[:num_copied].copy_(old[:num_copied])
    _share_storage(tensor, on_device(new))
    return tensor


_MEMORY = {
    "empty.memory_format": _empty,
    "empty_strided": _empty_strided,
    "resize_": _resize,
    "_copy_from": _copy_from,
}
