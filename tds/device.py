"""Device calls of tds, and the host allocator setting that ``megatron.device`` shares."""

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

# Every device call of tds goes through here: to ``torch.accelerator`` and torch's events, and so to any device.


class TorchAccelerator:
    """The methods of DeepSpeed's accelerator that tds calls, by torch, for a process without DeepSpeed."""

    def __init__(self, device_type: str) -> None:
        self._type = device_type

    def device_name(self, device_index: int | None = None) -> str:
        """Return the type of the device, with its index if that is given; the CPU has none."""
        return self._type if device_index is None or self._type == "cpu" else f"{self._type}:{device_index}"

    def communication_backend_name(self) -> str:
        """Return the backend of torch.distributed for the device."""
        return dist.get_default_backend_for_device(self._type)

    def is_synchronized_device(self) -> bool:
        """Return True if a call returns after its work is done."""
        return self._type in ("cpu", "mps")

    def get_rng_state(self) -> torch.Tensor:
        """Return the state of the random number generator of the current device."""
        state: torch.Tensor = self._module().get_rng_state()
        return state

    def set_rng_state(self, state: torch.Tensor) -> None:
        """Set the state of the random number generator of the current device."""
        self._module().set_rng_state(state)

    def pin_memory(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy of ``tensor`` in pinned memory; for the CPU ``tensor`` itself."""
        return tensor if self._type == "cpu" else tensor.pin_memory()

    def _module(self) -> Any:
        return torch if self._type == "cpu" else torch.get_device_module(self._type)


def get_accelerator() -> Any:
    """Return DeepSpeed's accelerator if DeepSpeed is loaded, where a plug-in may have replaced it, otherwise torch's.

    Both read the environment variable DS_ACCELERATOR.
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


def own(local_rank: int) -> torch.device:
    """Return the device of this rank."""
    return torch.device(get_accelerator().device_name(local_rank))


def is_host(device: torch.device) -> bool:
    """Return whether tensors on ``device`` lie in the host's memory, ready as soon as a call returns."""
    return device.type == "cpu"


def move(module: torch.nn.Module, device: torch.device) -> None:
    """Put ``module`` on ``device``; its parameters stay the objects that they are."""
    convert_parameters(module, lambda tensor: tensor.to(device))
    module.to(device)


@torch.no_grad()
def convert_parameters(module: torch.nn.Module, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Give each parameter of ``module`` what ``function`` makes of it, without making another object of it.

    Comes ahead of ``module.to`` on other devices than CPU and CUDA. There torch would put new parameters in place of
    the old ones, without the attributes that they carry, and one for each module that shares a weight.
    """
    if get_accelerator().device_name() in ("cpu", "cuda"):
        return
    for parameter in module.parameters():
        made = function(parameter)
        if made.device != parameter.device:
            torch_api.swap(parameter, torch.nn.Parameter(made, parameter.requires_grad))


def sends_over_host() -> bool:
    """Return True if the collectives of the device are those of the host (gloo)."""
    return get_accelerator().communication_backend_name() == "gloo"


def has_events(device: torch.device) -> bool:
    """Return whether work on ``device`` is queued, so that its times are those of events in the queue."""
    return not is_host(device) and not get_accelerator().is_synchronized_device()


def side_stream(device: torch.device) -> torch.Stream | None:
    """Return a new stream, for work that is not behind what the current one has; None where no work is queued."""
    return torch.Stream(device) if has_events(device) else None


def keep_for_current_stream(tensor: torch.Tensor) -> None:
    """Let the memory of ``tensor``, made on another stream, be given away only behind what the current one has so far
    when it is freed."""
    tensor.record_stream(torch.accelerator.current_stream(tensor.device))


def timing_event(device: torch.device) -> Any:
    """Return an event that can tell the time to another one."""
    return torch.Event(device, enable_timing=True)


def finish_stream(device: torch.device) -> None:
    """Wait until what was given to the current stream of ``device`` is done."""
    torch.accelerator.current_stream(device).synchronize()


def current(device: torch.device) -> AbstractContextManager[Any]:
    """Return a context in which ``device`` is the current one."""
    return torch.accelerator.device_index(device.index)


def random_numbers_kept(device: torch.device) -> AbstractContextManager[None]:
    """Return a context after which torch's generators of the host and of ``device`` are as before."""
    if is_host(device):
        return torch.random.fork_rng(devices=[])
    return torch.random.fork_rng(devices=[device], device_type=device.type)


def random_states() -> tuple[torch.Tensor, torch.Tensor]:
    """Return the states of torch's generators of the host and of the current device."""
    return torch.get_rng_state(), get_accelerator().get_rng_state()


@contextmanager
def drawing_from(states: tuple[torch.Tensor, torch.Tensor]) -> Iterator[None]:
    """Draw random numbers from ``states`` within; afterwards from where the generators stand now."""
    now = random_states()
    torch.set_rng_state(states[0])
    get_accelerator().set_rng_state(states[1])
    try:
        yield
    finally:
        torch.set_rng_state(now[0])
        get_accelerator().set_rng_state(now[1])


def host_copy(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of ``tensor`` in the host's memory, made behind what is queued on its device."""
    copy = torch.empty_like(tensor, device="cpu", pin_memory=not is_host(tensor.device))
    return copy.copy_(tensor, non_blocking=True)


# What glibc does with memory that a stage on a CPU frees.

TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3
"""Names of two settings in malloc.h."""
LARGEST_KEPT = (2**30, 2**25)
"""Bytes of the largest tensor that is kept: what newer releases of glibc take, and what older ones do (32 MiB)."""


def keep_freed() -> bool:
    """Let glibc keep what this process frees; return whether it will.

    By itself it gives each freed tensor above 32 MiB back, and the system hands out zeroed pages for the next one: a
    stage that makes logits of [4, 256, 8192] spent a sixth of its time there. Where another allocator is in charge, or
    the user has set a variable of glibc's own (``MALLOC_...``, or ``glibc.malloc`` in ``GLIBC_TUNABLES``), nothing is
    changed.

    Source: mallopt(3), ``M_TRIM_THRESHOLD`` and ``M_MMAP_THRESHOLD``.
    """
    is_set = any(variable.startswith("MALLOC_") for variable in os.environ)
    if is_set or "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", ""):
        return False
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is None:
        return False
    for size in LARGEST_KEPT:  # the map threshold first: setting the other one alone freezes it where it is
        if set_option(MMAP_THRESHOLD, size):
            return bool(set_option(TRIM_THRESHOLD, LARGEST_KEPT[0]))
    return False


def upload(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a copy of ``tensor`` on ``device``. The host does not wait for it: it lies in pinned memory meanwhile."""
    if is_host(device) or not is_host(tensor.device):
        return tensor.to(device, copy=True)
    pinned = tensor if tensor.is_pinned() else get_accelerator().pin_memory(tensor)
    return pinned.to(device, non_blocking=True)


def to_device(value: Any, device: torch.device) -> Any:
    """Return ``value`` with every tensor in it on ``device``, by ``upload``.

    Lists become tuples, as DeepSpeed gives them; a namedtuple stays one.
    """
    if isinstance(value, torch.Tensor):
        return value if value.device == device else upload(value, device)
    if isinstance(value, (tuple, list)):
        return tuple_like(value, [to_device(each, device) for each in value])
    if isinstance(value, dict):
        return {key: to_device(each, device) for key, each in value.items()}
    return value


def tuple_like(value: tuple[Any, ...] | list[Any], parts: list[Any]) -> tuple[Any, ...]:
    """Return ``parts`` in a tuple, or a namedtuple if ``value`` is one."""
    return type(value)(*parts) if isinstance(value, tuple) and hasattr(value, "_fields") else tuple(parts)
