"""tds's device calls, and the host allocator setting that ``megatron.device`` shares."""

from __future__ import annotations

import ctypes
import functools
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.distributed as dist

from tds import torch_api

# All of tds's device calls go through this file, which uses ``torch.accelerator`` and torch's events for any device
# type.


class TorchAccelerator:
    """DeepSpeed's accelerator methods that tds calls, implemented by torch for processes without DeepSpeed."""

    def __init__(self, device_type: str) -> None:
        self._type = device_type

    def device_name(self, device_index: int | None = None) -> str:
        """Return the device type, with the index if one is given; the CPU has no index."""
        return self._type if device_index is None or self._type == "cpu" else f"{self._type}:{device_index}"

    def communication_backend_name(self) -> str:
        return dist.get_default_backend_for_device(self._type)

    def is_synchronized_device(self) -> bool:
        """Return True if a call returns after its work is done."""
        return self._type in ("cpu", "mps")

    def get_rng_state(self) -> torch.Tensor:
        state: torch.Tensor = self._module().get_rng_state()
        return state

    def set_rng_state(self, state: torch.Tensor) -> None:
        self._module().set_rng_state(state)

    def pin_memory(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy ``tensor`` to pinned memory; on the CPU, return ``tensor`` itself."""
        return tensor if self._type == "cpu" else tensor.pin_memory()

    def _module(self) -> Any:
        return torch if self._type == "cpu" else torch.get_device_module(self._type)


def get_accelerator() -> Any:
    """Return DeepSpeed's accelerator if DeepSpeed is loaded, otherwise torch's.

    A plug-in may have replaced DeepSpeed's accelerator. Both read the environment variable DS_ACCELERATOR.
    """
    loaded = sys.modules.get("deepspeed.accelerator")
    if loaded is not None and hasattr(loaded, "get_accelerator"):
        return loaded.get_accelerator()
    if name := os.environ.get("DS_ACCELERATOR"):
        return _torch_accelerator(name)
    current = torch.accelerator.current_accelerator(check_available=True)
    return _torch_accelerator("cpu" if current is None else current.type)


@functools.cache
def _torch_accelerator(device_type: str) -> TorchAccelerator:
    return TorchAccelerator(device_type)


def local_device(local_rank: int) -> torch.device:
    """Return this rank's device."""
    return torch.device(get_accelerator().device_name(local_rank))


def is_host(device: torch.device) -> bool:
    """Return True if ``device`` is the CPU, whose results are ready as soon as a call returns."""
    return device.type == "cpu"


def move(module: torch.nn.Module, device: torch.device) -> None:
    """Move ``module`` to ``device`` and keep its parameter objects."""
    convert_parameters(module, lambda tensor: tensor.to(device))
    module.to(device)


@torch.no_grad()
def convert_parameters(module: torch.nn.Module, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Apply ``function`` to each parameter value in ``module``, and keep the parameter objects.

    Must be called before ``module.to`` on devices other than CPU and CUDA. On these devices, torch would create new
    parameters without the old ones' attributes, and a separate one for each module that shares a weight.
    """
    if get_accelerator().device_name() in ("cpu", "cuda"):
        return
    for parameter in module.parameters():
        converted = function(parameter)
        if converted.device != parameter.device:
            torch_api.swap(parameter, torch.nn.Parameter(converted, parameter.requires_grad))


def runs_collectives_on_host() -> bool:
    """Return True if collectives on device tensors run on the host (gloo)."""
    return get_accelerator().communication_backend_name() == "gloo"


def has_events(device: torch.device) -> bool:
    """Return True if work on ``device`` is queued, so that it must be timed by events."""
    return not is_host(device) and not get_accelerator().is_synchronized_device()


def side_stream(device: torch.device) -> torch.Stream | None:
    """Create a stream for work that must not wait for the current stream; None if the device has no queue."""
    return torch.Stream(device) if has_events(device) else None


def record_current_stream(tensor: torch.Tensor) -> None:
    """Record that the current stream uses ``tensor``, which was allocated on another stream.

    The allocator then reuses the freed tensor's memory only after the work that was queued on the current stream
    when the tensor was freed.
    """
    tensor.record_stream(torch.accelerator.current_stream(tensor.device))


def timing_event(device: torch.device) -> Any:
    """Create an event that can measure time."""
    return torch.Event(device, enable_timing=True)


def synchronize_stream(device: torch.device) -> None:
    """Wait for the current stream on ``device``."""
    torch.accelerator.current_stream(device).synchronize()


def device_context(device: torch.device) -> AbstractContextManager[Any]:
    """Return a context in which ``device`` is the current device."""
    return torch.accelerator.device_index(device.index)


def preserve_rng_states(device: torch.device) -> AbstractContextManager[None]:
    """Return a context that restores torch's random generators on the host and on ``device`` at its end."""
    if is_host(device):
        return torch.random.fork_rng(devices=[])
    return torch.random.fork_rng(devices=[device], device_type=device.type)


def rng_states() -> tuple[torch.Tensor, torch.Tensor]:
    """Return torch's random states on the host and on the current device."""
    return torch.get_rng_state(), get_accelerator().get_rng_state()


@contextmanager
def use_rng_states(states: tuple[torch.Tensor, torch.Tensor]) -> Iterator[None]:
    """Set the random generators to ``states`` in the block and restore their previous states afterwards."""
    previous = rng_states()
    torch.set_rng_state(states[0])
    get_accelerator().set_rng_state(states[1])
    try:
        yield
    finally:
        torch.set_rng_state(previous[0])
        get_accelerator().set_rng_state(previous[1])


def host_copy(tensor: torch.Tensor) -> torch.Tensor:
    """Start copying ``tensor`` to host memory, after the work queued on its device, and return the copy."""
    copy = torch.empty_like(tensor, device="cpu", pin_memory=not is_host(tensor.device))
    return copy.copy_(tensor, non_blocking=True)


# Host allocator for stages on a CPU.

TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3
"""Values of ``M_TRIM_THRESHOLD`` and ``M_MMAP_THRESHOLD`` in malloc.h."""
MAX_RETAINED_BYTES = (2**30, 2**25)
"""Maximum bytes per retained tensor: for newer glibc releases, and for older ones (32 MiB)."""


def keep_freed() -> bool:
    """Make glibc retain the memory that this process frees; return True if it does.

    By default, glibc returns each freed tensor above 32 MiB to the system, and the next tensor gets zeroed pages. A
    stage that computes logits of [4, 256, 8192] spent a sixth of its time on this. Nothing is changed if another
    allocator is in use, or if the user has set a glibc variable (``MALLOC_...``, or ``glibc.malloc`` in
    ``GLIBC_TUNABLES``).

    Source: mallopt(3), ``M_TRIM_THRESHOLD`` and ``M_MMAP_THRESHOLD``.
    """
    is_set = any(variable.startswith("MALLOC_") for variable in os.environ)
    if is_set or "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", ""):
        return False
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is None:
        return False
    for size in MAX_RETAINED_BYTES:  # the mmap threshold first: setting only the trim threshold would freeze it
        if set_option(MMAP_THRESHOLD, size):
            return bool(set_option(TRIM_THRESHOLD, MAX_RETAINED_BYTES[0]))
    return False


def upload(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy ``tensor`` to ``device`` asynchronously, from pinned memory."""
    if is_host(device) or not is_host(tensor.device):
        return tensor.to(device, copy=True)
    pinned = tensor if tensor.is_pinned() else get_accelerator().pin_memory(tensor)
    return pinned.to(device, non_blocking=True)


def to_device(value: Any, device: torch.device) -> Any:
    """Move all tensors in ``value`` to ``device`` by ``upload``.

    Lists become tuples, as in DeepSpeed; a namedtuple stays a namedtuple.
    """
    if isinstance(value, torch.Tensor):
        return value if value.device == device else upload(value, device)
    if isinstance(value, (tuple, list)):
        return tuple_like(value, [to_device(element, device) for element in value])
    if isinstance(value, dict):
        return {key: to_device(element, device) for key, element in value.items()}
    return value


def tuple_like(value: tuple[Any, ...] | list[Any], elements: list[Any]) -> tuple[Any, ...]:
    """Convert ``elements`` to a tuple, or to a namedtuple if ``value`` is one."""
    return type(value)(*elements) if isinstance(value, tuple) and hasattr(value, "_fields") else tuple(elements)
