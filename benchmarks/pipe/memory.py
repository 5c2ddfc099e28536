"""What a step holds in tensors: bytes that lie there before it, and the most that it adds.

The added bytes are counted in torch's own allocator, each allocation and release by size (torch's profiler with
``profile_memory``); what the system's allocator keeps is no part of it. Not to be used in a step that is timed.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor  # a trace of torch.compile may leave some
from torch.autograd import profiler


def measure(step: Callable[[], Any]) -> tuple[int, int]:
    """Return (bytes of tensors alive before ``step``, the most that lay there beyond them while it ran)."""
    before = bytes_alive()
    with profiler.profile(profile_memory=True, use_kineto=True) as profile:
        step()
    results = profile.kineto_results
    changes = [(event.start_ns(), event.nbytes()) for event in results.events() if event.name() == "[memory]"]
    now = peak = 0
    for _, change in sorted(changes, key=lambda each: each[0]):
        now += change
        peak = max(peak, now)
    return before, peak


def bytes_alive() -> int:
    """Return the bytes of all tensors that Python can reach, those that share memory counted once."""
    gc.collect()
    storages: dict[int, int] = {}
    for thing in gc.get_objects():
        if issubclass(type(thing), torch.Tensor) and not isinstance(thing, FakeTensor):
            for tensor in (thing, thing.grad if thing.is_leaf else None):
                if tensor is not None and tensor.device.type == "cpu" and tensor.layout is torch.strided:
                    storage = tensor.untyped_storage()
                    storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())
