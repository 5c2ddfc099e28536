"""Every device call of tds goes through here: to ``torch.accelerator`` and torch's events, and so to any device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from tds import torch_api
from tds.compatibility import theirs


def get_accelerator() -> Any:
    """Return DeepSpeed's accelerator, which DeepSpeed chooses when it is first asked for."""
    return theirs("deepspeed.accelerator").get_accelerator()


def own(local_rank: int) -> torch.device:
    """Return the device of this rank, as DeepSpeed's accelerator names it."""
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
    """Return whether the device's own collectives are those of the host, gloo, as DeepSpeed's accelerator has it."""
    return get_accelerator().communication_backend_name() == "gloo"


def has_events(device: torch.device) -> bool:
    """Return whether work on ``device`` is queued, so that its times are those of events in the queue."""
    return not is_host(device) and not get_accelerator().is_synchronized_device()


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
