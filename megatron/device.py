"""Every device call of the project goes through here, so that another accelerator is one plug-in.

A device is named by its kind, as ``--device`` and ``torch.device`` do. For every kind but the CPU the calls go to
``torch.accelerator``, or to the module that torch has for the kind, ``torch.get_device_module(kind)``, where the former
has no such call. A plug-in may bring any function marked ``_by_plugin`` itself (``Accelerator.hooks``).
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
    """Let the hook of a plug-in take the place of ``function`` for its device, the first argument."""

    @functools.wraps(function)
    def call(place: str | torch.device, *args: Any) -> Any:
        plugin = accelerators.find(place if isinstance(place, str) else place.type)
        hook = plugin.hooks.get(function.__name__, function) if plugin else function
        return hook(place, *args)

    return call  # type: ignore[return-value]


def choose(requested: str = "auto") -> str:
    """Return the kind of device to use: ``requested``, or for "auto" the best one that there is.

    That is a plug-in's, the last one imported first, then CUDA, then the CPU. DS_ACCELERATOR, which DeepSpeed reads
    too, makes "auto" mean the kind that it names, where it is one of these.

    Raises:
        ValueError: ``requested`` is not known, or cannot be used on this machine.
    """
    if problem := accelerators.problem(requested):
        raise ValueError(problem)
    if requested == "auto":
        named = os.environ.get("DS_ACCELERATOR", "")
        wanted = (named,) if named in accelerators.names() else tuple(reversed(accelerators.names()))
        return next((kind for kind in wanted if is_available(kind)), "cpu")
    if not is_available(requested):
        advice = "install torch for your CUDA version" if requested == "cuda" else "look at what its plug-in needs"
        build = " and a CUDA build of torch" if requested == "cuda" else ""
        raise ValueError(
            f"--device {requested} needs a {requested.upper()} device{build}, found none. "
            f"Use --device cpu, or {advice}."
        )
    return requested


def is_available(kind: str) -> bool:
    """Return whether this machine has a device of this kind that can be used."""
    if plugin := accelerators.find(kind):
        return plugin.is_available()
    return kind == "cpu" or (kind == "cuda" and torch.cuda.is_available())


def prepare(kind: str) -> None:
    """Let the plug-in of this kind, if it is one's, make it ready."""
    plugin = accelerators.find(kind)
    if plugin is not None and plugin.prepare is not None:
        plugin.prepare()


@_by_plugin
def bind(kind: str, local_rank: int) -> torch.device:
    """Make device ``local_rank`` of this kind the current one and return it.

    Raises:
        ValueError: this process does not see so many.
    """
    if kind == "cpu":
        return torch.device("cpu")
    number = torch.accelerator.device_count()
    if local_rank >= number:
        raise ValueError(
            f"LOCAL_RANK must be below the number of {kind} devices that this process sees, got {local_rank} and "
            f"{number}. Start as many ranks on each node as it has devices. Where the launcher shows each process only "
            "its own device (CUDA_VISIBLE_DEVICES, srun --gpus-per-task), let it show all (srun --gpu-bind=none), or "
            "set LOCAL_RANK=0"
        )
    torch.accelerator.set_device_index(local_rank)
    return torch.device(kind, local_rank)


def keep_freed_memory() -> bool:
    """Let glibc keep what this process frees, as the stages of tds do; return whether it will."""
    from tds.device import keep_freed

    return keep_freed()


@_by_plugin
def name(kind: str) -> str:
    """Return what the device calls itself."""
    if kind == "cpu":
        threads = torch.get_num_threads()
        return f"CPU, {threads} thread{'' if threads == 1 else 's'}"
    named = getattr(torch.get_device_module(kind), "get_device_name", None)
    return named() if named is not None else kind


@_by_plugin
def identity(place: torch.device) -> str:
    """Return what tells the device from all others of its host; "" where it does not say, and for the CPU."""
    if place.type == "cpu":
        return ""
    facts = getattr(torch.get_device_module(place), "get_device_properties", lambda _: None)(place)
    number = getattr(facts, "uuid", None)
    if number is None:
        return ""
    slot = [getattr(facts, name, 0) for name in ("pci_domain_id", "pci_bus_id", "pci_device_id")]
    return f"GPU-{number} at {slot[0]:04x}:{slot[1]:02x}:{slot[2]:02x}"


@_by_plugin
def model_name(place: torch.device) -> str:
    """Return what the device is called, with the number of its multiprocessors; "" for the CPU."""
    if place.type == "cpu":
        return ""
    facts = getattr(torch.get_device_module(place), "get_device_properties", lambda _: None)(place)
    return f"{name(place.type)}, {getattr(facts, 'multi_processor_count', 0)} multiprocessors"


def versions() -> dict[str, str]:
    """Return the versions of the libraries that a process on CUDA has loaded: a system's may hide those of torch."""
    if not torch.cuda.is_initialized():
        return {}
    nccl = ".".join(map(str, torch.cuda.nccl.version()))
    return {"CUDA": str(torch.version.cuda), "cuDNN": str(torch.backends.cudnn.version()), "NCCL": nccl}


@_by_plugin
def backend(kind: str) -> str:
    """Return torch.distributed's backend for this kind of device; "" where only DeepSpeed can say."""
    plugin = accelerators.find(kind)
    return plugin.backend if plugin else "nccl" if kind == "cuda" else "gloo"


@_by_plugin
def default_precision(kind: str) -> str:
    """Return the number format to take where none is said: bf16 on GPUs that have it, else fp16; fp32 on CPU."""
    if plugin := accelerators.find(kind):
        return plugin.dtypes[0]
    if kind == "cpu":
        return "fp32"
    return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp16"


def missing_dtype(kind: str, dtype: str | None) -> str | None:
    """Return why a plug-in's device cannot compute in ``dtype``, or None; CPU and CUDA are judged elsewhere."""
    plugin = accelerators.find(kind)
    if plugin is None or dtype is None or dtype in plugin.dtypes:
        return None
    return f"--device {kind} computes in {', '.join(plugin.dtypes)}, got --{dtype}. Use --{plugin.dtypes[0]}"


@_by_plugin
def can_pin(kind: str) -> bool:
    """Return whether the device copies from pinned host memory while it computes."""
    return kind != "cpu"


@_by_plugin
def synchronize(kind: str) -> None:
    """Wait until all work given to the device is done."""
    if kind != "cpu":
        torch.accelerator.synchronize()


@_by_plugin
def finish_copies(place: torch.device) -> None:
    """Wait until what was given to the current stream of ``place`` is done."""
    if place.type != "cpu":
        torch.accelerator.current_stream(place).synchronize()


def mark(place: torch.device) -> Any:
    """Return an event behind all that was given to the current stream of ``place``; ``synchronize`` waits for it."""
    event = torch.Event(place)
    event.record()
    return event


def host_memory(shape: tuple[int, ...], dtype: torch.dtype, place: torch.device) -> torch.Tensor:
    """Return memory of the host for tensors of ``place``, pinned where copies can then run beside the computation."""
    return torch.empty(shape, dtype=dtype, pin_memory=can_pin(place.type))


def copy_to_host(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy ``source`` into ``host_memory``, beside the computation; ``copy_from_host`` waits for it."""
    if not can_pin(source.device.type):
        target.copy_(source)
        return
    beside = _copy_stream(source.device)
    beside.wait_stream(torch.accelerator.current_stream(source.device))
    with beside:
        target.copy_(source, non_blocking=True)
    source.record_stream(beside)  # its memory is not given to another before the copy has read it


def copy_from_host(source: torch.Tensor, place: torch.device) -> torch.Tensor:
    """Return what ``copy_to_host`` has put into ``source``, on ``place``."""
    if not can_pin(place.type):
        return source.to(place, copy=True)
    target = torch.empty(source.shape, dtype=source.dtype, device=place)
    beside, current = _copy_stream(place), torch.accelerator.current_stream(place)
    beside.wait_stream(current)
    with beside:
        target.copy_(source, non_blocking=True)
    current.wait_stream(beside)
    return target


def start_upload(tensors: Mapping[str, torch.Tensor], place: torch.device) -> tuple[dict[str, torch.Tensor], Any]:
    """Return copies of ``tensors`` on ``place``, and what ``await_upload`` needs to let others use them.

    Pinned tensors are copied on a stream of their own, beside the computation; a device that cannot do so has copied
    them when this returns.
    """
    if not can_pin(place.type):
        return {name: tensor.to(place) for name, tensor in tensors.items()}, None
    beside = _copy_stream(place, "uploads")
    with beside:
        copies = {name: tensor.to(place, non_blocking=True) for name, tensor in tensors.items()}
    return copies, beside.record_event()


def await_upload(copies: Iterable[torch.Tensor], place: torch.device, uploaded: Any) -> None:
    """Let what follows on the current stream of ``place`` use ``copies``: the device waits for them, not the host."""
    if uploaded is None:
        return
    current = torch.accelerator.current_stream(place)
    current.wait_event(uploaded)
    for copy in copies:
        copy.record_stream(current)  # its memory is not given to the next upload before the computation has read it


def give(parameter: torch.nn.Parameter, tensor: torch.Tensor) -> None:
    """Let ``parameter`` hold ``tensor``, perhaps on another device; it stays the object that it is."""
    with torch.no_grad():
        if torch._has_compatible_shallow_copy_type(parameter, tensor):
            parameter.data = tensor
        else:
            _swap_tensor_impl(parameter, torch.nn.Parameter(tensor, parameter.requires_grad))


@functools.cache
def _copy_stream(place: torch.device, use: str = "activations") -> torch.Stream:
    return torch.Stream(place)


@_by_plugin
def is_busy(place: torch.device) -> bool:
    """Return whether ``place`` still has work: the host is ahead, and waits for it or soon will."""
    if place.type == "cpu":
        return False
    try:
        return not torch.get_device_module(place).default_stream(place).query()
    except RuntimeError:  # the device itself has failed
        return False


def seed(value: int) -> None:
    """Seed torch's default generators of the CPU and of all devices."""
    torch.manual_seed(value)


@_by_plugin
def default_generator(place: torch.device) -> torch.Generator:
    """Return the generator that torch's random functions on ``place`` use."""
    if place.type == "cpu":
        return torch.default_generator
    index = place.index if place.index is not None else torch.accelerator.current_device_index()
    return torch.get_device_module(place).default_generators[index]


def rng_states(kind: str) -> dict[str, torch.Tensor]:
    """Return the states of the default generators, as byte tensors by device kind."""
    states = {"cpu": torch.get_rng_state()}
    if kind != "cpu":
        states[kind] = default_generator(torch.device(kind)).get_state()
    return states


def set_rng_states(states: dict[str, torch.Tensor]) -> None:
    """Put back what ``rng_states`` returned, of the devices that are there."""
    for kind, state in states.items():
        if kind in accelerators.names() and is_available(kind):
            default_generator(torch.device(kind)).set_state(state)


@_by_plugin
def peak_memory_bytes(kind: str) -> int:
    """Return the most memory that this process has held: of the device's allocator, resident size on CPU."""
    if kind != "cpu":
        return torch.accelerator.max_memory_allocated()
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def count(kind: str) -> int:
    """Return the devices of this kind that this process sees; of a CPU the cores that it may use."""
    return len(os.sched_getaffinity(0)) if kind == "cpu" else torch.accelerator.device_count()


def memory_of_others(kind: str) -> int:
    """Return the bytes of the current device that are in use, but not by tensors of this process; 0 on a CPU."""
    if kind == "cpu":
        return 0
    free, total = torch.accelerator.get_memory_info()
    return max(0, total - free - torch.accelerator.memory_reserved())


@_by_plugin
def total_memory_bytes(kind: str) -> int:
    """Return the memory of the device, or of the node for a CPU."""
    if kind != "cpu":
        return torch.accelerator.get_memory_info()[1]
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
