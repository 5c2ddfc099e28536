"""All device calls in the project, so that one plug-in can add another accelerator.

Devices are identified by their device type, as in ``--device`` and ``torch.device``. For every type but the CPU, calls
are forwarded to ``torch.accelerator``, or to ``torch.get_device_module(device_type)`` if ``torch.accelerator`` has no
such call. A plug-in may override every function marked ``_by_plugin`` (``Accelerator.hooks``).
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import torch
from torch._C import _swap_tensor_impl

from megatron import accelerators

DTYPES = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}

_Call = TypeVar("_Call", bound=Callable[..., Any])


def _by_plugin(function: _Call) -> _Call:
    """Decorate ``function``, whose first argument is a device or device type, so that a plug-in's hook replaces it."""

    @functools.wraps(function)
    def call(device: str | torch.device, *args: Any) -> Any:
        plugin = accelerators.find(device if isinstance(device, str) else device.type)
        hook = plugin.hooks.get(function.__name__, function) if plugin else function
        return hook(device, *args)

    return call  # type: ignore[return-value]


def choose(requested: str = "auto") -> str:
    """Choose the device type: ``requested``, or for "auto" the best type that is available.

    "auto" tries the plug-ins (last imported first), then CUDA, then the CPU. If the environment's DS_ACCELERATOR, which
    DeepSpeed also reads, names a device type, "auto" only tries this type and then the CPU.

    Raises:
        ValueError: ``requested`` is unknown, or cannot be used on this machine.
    """
    if problem := accelerators.problem(requested):
        raise ValueError(problem)
    if requested == "auto":
        env_choice = os.environ.get("DS_ACCELERATOR", "")
        candidates = (env_choice,) if env_choice in accelerators.names() else tuple(reversed(accelerators.names()))
        return next((device_type for device_type in candidates if is_available(device_type)), "cpu")
    if not is_available(requested):
        advice = "install torch for your CUDA version" if requested == "cuda" else "check what its plug-in requires"
        build_hint = " and a CUDA build of torch" if requested == "cuda" else ""
        raise ValueError(
            f"--device {requested} needs a {requested.upper()} device{build_hint}, found none. "
            f"Use --device cpu, or {advice}."
        )
    return requested


def is_available(device_type: str) -> bool:
    """Check if this machine has a usable device of this type."""
    if plugin := accelerators.find(device_type):
        return plugin.is_available()
    return device_type == "cpu" or (device_type == "cuda" and torch.cuda.is_available())


def prepare(device_type: str) -> None:
    """Run the plug-in's preparation for this device type, if there is one."""
    plugin = accelerators.find(device_type)
    if plugin is not None and plugin.prepare is not None:
        plugin.prepare()


@_by_plugin
def bind(device_type: str, local_rank: int) -> torch.device:
    """Make device ``local_rank`` of this type the current device and return it.

    Raises:
        ValueError: this process sees fewer devices.
    """
    if device_type == "cpu":
        return torch.device("cpu")
    num_devices = torch.accelerator.device_count()
    if local_rank >= num_devices:
        raise ValueError(
            f"LOCAL_RANK must be below the number of {device_type} devices that this process sees, got {local_rank} "
            f"and {num_devices}. Start as many ranks on each node as it has devices. If the launcher exposes only one "
            "device to each process (CUDA_VISIBLE_DEVICES, srun --gpus-per-task), expose all of them (srun "
            "--gpu-bind=none), or set LOCAL_RANK=0"
        )
    torch.accelerator.set_device_index(local_rank)
    return torch.device(device_type, local_rank)


def keep_freed_memory() -> bool:
    """Configure glibc to retain freed memory, as the pipeline engine does; return True on success."""
    from tds.device import keep_freed

    return keep_freed()


@_by_plugin
def name(device_type: str) -> str:
    """Return the device name, such as "NVIDIA H100 80GB HBM3"."""
    if device_type == "cpu":
        threads = torch.get_num_threads()
        return f"CPU, {threads} thread{'' if threads == 1 else 's'}"
    get_name = getattr(torch.get_device_module(device_type), "get_device_name", None)
    return get_name() if get_name is not None else device_type


@_by_plugin
def identity(device: torch.device) -> str:
    """Return an identifier of the device that is unique on its host; "" if it is unknown, and for the CPU."""
    if device.type == "cpu":
        return ""
    properties = getattr(torch.get_device_module(device), "get_device_properties", lambda _: None)(device)
    uuid = getattr(properties, "uuid", None)
    if uuid is None:
        return ""
    pci_ids = [getattr(properties, name, 0) for name in ("pci_domain_id", "pci_bus_id", "pci_device_id")]
    return f"GPU-{uuid} at {pci_ids[0]:04x}:{pci_ids[1]:02x}:{pci_ids[2]:02x}"


@_by_plugin
def model_name(device: torch.device) -> str:
    """Return the device's name and multiprocessor count; "" for the CPU."""
    if device.type == "cpu":
        return ""
    properties = getattr(torch.get_device_module(device), "get_device_properties", lambda _: None)(device)
    return f"{name(device.type)}, {getattr(properties, 'multi_processor_count', 0)} multiprocessors"


def versions() -> dict[str, str]:
    """List the loaded CUDA libraries' versions by name (system libraries may shadow torch's); empty without CUDA."""
    if not torch.cuda.is_initialized():
        return {}
    nccl = ".".join(map(str, torch.cuda.nccl.version()))
    return {"CUDA": str(torch.version.cuda), "cuDNN": str(torch.backends.cudnn.version()), "NCCL": nccl}


@_by_plugin
def backend(device_type: str) -> str:
    """Choose torch.distributed's backend for this device type; "" if only DeepSpeed knows it."""
    plugin = accelerators.find(device_type)
    return plugin.backend if plugin else "nccl" if device_type == "cuda" else "gloo"


@_by_plugin
def default_precision(device_type: str) -> str:
    """Choose the default number format: bf16 on GPUs that support it, otherwise fp16; fp32 on the CPU."""
    if plugin := accelerators.find(device_type):
        return plugin.dtypes[0]
    if device_type == "cpu":
        return "fp32"
    return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp16"


def compute_capability(device_type: str) -> tuple[int, int] | None:
    """Return the compute capability of NVIDIA's GPUs, such as (9, 0); None for other devices, also for AMD's GPUs."""
    if device_type != "cuda" or torch.version.hip is not None:
        return None
    return torch.cuda.get_device_capability()


def missing_dtype(device_type: str, dtype: str | None) -> str | None:
    """Explain why a plug-in's device cannot compute in ``dtype``; None if it can. CPU and CUDA are not checked."""
    plugin = accelerators.find(device_type)
    if plugin is None or dtype is None or dtype in plugin.dtypes:
        return None
    return f"--device {device_type} supports {', '.join(plugin.dtypes)}, got --{dtype}. Use --{plugin.dtypes[0]}"


@_by_plugin
def can_pin(device_type: str) -> bool:
    """Check if the device can copy from pinned host memory while it computes."""
    return device_type != "cpu"


@_by_plugin
def synchronize(device_type: str) -> None:
    """Wait until the device has finished all queued work."""
    if device_type != "cpu":
        torch.accelerator.synchronize()


@_by_plugin
def finish_copies(device: torch.device) -> None:
    """Wait until the current stream of ``device`` has finished all queued work."""
    if device.type != "cpu":
        torch.accelerator.current_stream(device).synchronize()


def record_event(device: torch.device) -> Any:
    """Record and return an event after all work queued on the current stream of ``device``."""
    event = torch.Event(device)
    event.record()
    return event


def host_memory(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Allocate uninitialized host memory for tensors on ``device``; pinned if copies then overlap computation."""
    return torch.empty(shape, dtype=dtype, pin_memory=can_pin(device.type))


def copy_to_host(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy ``source`` to ``target`` (from ``host_memory``) asynchronously; ``copy_from_host`` waits for the copy."""
    if not can_pin(source.device.type):
        target.copy_(source)
        return
    copy_stream = _copy_stream(source.device)
    copy_stream.wait_stream(torch.accelerator.current_stream(source.device))
    with copy_stream:
        target.copy_(source, non_blocking=True)
    source.record_stream(copy_stream)  # the allocator must not reuse its memory before the copy has read it


def copy_from_host(source: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy the tensor that ``copy_to_host`` wrote to ``source`` back to ``device``."""
    if not can_pin(device.type):
        return source.to(device, copy=True)
    target = torch.empty(source.shape, dtype=source.dtype, device=device)
    copy_stream, current = _copy_stream(device), torch.accelerator.current_stream(device)
    copy_stream.wait_stream(current)
    with copy_stream:
        target.copy_(source, non_blocking=True)
    current.wait_stream(copy_stream)
    return target


def start_upload(tensors: Mapping[str, torch.Tensor], device: torch.device) -> tuple[dict[str, torch.Tensor], Any]:
    """Copy ``tensors`` to ``device``; return the copies, and a token for ``await_upload``.

    Pinned tensors are copied on a separate stream, overlapped with computation. On a device that cannot overlap, the
    copies are complete when this function returns.
    """
    if not can_pin(device.type):
        return {name: tensor.to(device) for name, tensor in tensors.items()}, None
    copy_stream = _copy_stream(device, "uploads")
    with copy_stream:
        copies = {name: tensor.to(device, non_blocking=True) for name, tensor in tensors.items()}
    return copies, copy_stream.record_event()


def await_upload(copies: Iterable[torch.Tensor], device: torch.device, uploaded: Any) -> None:
    """Make the current stream of ``device`` wait for ``copies`` before later work. Does not block the host.

    Args:
        uploaded: the token of ``start_upload``.
    """
    if uploaded is None:
        return
    current = torch.accelerator.current_stream(device)
    current.wait_event(uploaded)
    for copy in copies:
        copy.record_stream(current)  # the next upload must not reuse its memory before the computation has read it


def replace_data(parameter: torch.nn.Parameter, tensor: torch.Tensor) -> None:
    """Replace the data of ``parameter`` in place by ``tensor``, which may be on another device."""
    with torch.no_grad():
        if torch._has_compatible_shallow_copy_type(parameter, tensor):
            parameter.data = tensor
        else:
            _swap_tensor_impl(parameter, torch.nn.Parameter(tensor, parameter.requires_grad))


@functools.cache
def _copy_stream(device: torch.device, purpose: str = "activations") -> torch.Stream:
    return torch.Stream(device)


@_by_plugin
def is_busy(device: torch.device) -> bool:
    """Check if the default stream on ``device`` has unfinished work."""
    if device.type == "cpu":
        return False
    try:
        return not torch.get_device_module(device).default_stream(device).query()
    except RuntimeError:  # the device has failed
        return False


def seed(value: int) -> None:
    """Seed the default generators of the CPU and all devices."""
    torch.manual_seed(value)


@_by_plugin
def default_generator(device: torch.device) -> torch.Generator:
    """Look up the generator that torch's random functions use on ``device``."""
    if device.type == "cpu":
        return torch.default_generator
    index = device.index if device.index is not None else torch.accelerator.current_device_index()
    return torch.get_device_module(device).default_generators[index]


def rng_states(device_type: str) -> dict[str, torch.Tensor]:
    """Map device types to their default generator's state, as a byte tensor."""
    states = {"cpu": torch.get_rng_state()}
    if device_type != "cpu":
        states[device_type] = default_generator(torch.device(device_type)).get_state()
    return states


def set_rng_states(states: dict[str, torch.Tensor]) -> None:
    """Restore the states returned by ``rng_states``, for the device types that are available."""
    for device_type, state in states.items():
        if device_type in accelerators.names() and is_available(device_type):
            default_generator(torch.device(device_type)).set_state(state)


@_by_plugin
def peak_memory_bytes(device_type: str) -> int:
    """Read this process's peak memory in bytes: the device allocator's, or the resident size on the CPU."""
    if device_type != "cpu":
        return torch.accelerator.max_memory_allocated()
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def num_devices(device_type: str) -> int:
    """Count the devices that this process sees; for the CPU, the cores that it may use."""
    return len(os.sched_getaffinity(0)) if device_type == "cpu" else torch.accelerator.device_count()


def memory_of_others(device_type: str) -> int:
    """Measure the bytes in use on the current device outside of this process's allocator; 0 on the CPU."""
    if device_type == "cpu":
        return 0
    free, total = torch.accelerator.get_memory_info()
    return max(0, total - free - torch.accelerator.memory_reserved())


@_by_plugin
def total_memory_bytes(device_type: str) -> int:
    """Read the device's memory size in bytes; for the CPU, the node's."""
    if device_type != "cpu":
        return torch.accelerator.get_memory_info()[1]
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
