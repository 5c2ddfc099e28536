"""What a step holds in tensors: bytes that lie there before it, and the most that it adds.

The added bytes are counted in torch's own allocator, each allocation and release by address and size (torch's profiler
with ``profile_memory``); what the system's allocator keeps is no part of it. The profiler hears of this thread alone,
and what a message held may be released in one of gloo's: such a block, which is gone after the step though nobody saw
it go, is left out. Not to be used in a step that is timed.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Container, Iterable
from itertools import accumulate
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor  # a trace of torch.compile may leave some
from torch.autograd import profiler

Event = tuple[int, int]
"""Address, and by how many bytes what lies there changes."""


def measure(step: Callable[[], Any]) -> tuple[int, int]:
    """Return (bytes of tensors alive before ``step``, the most that lay there beyond them while it ran)."""
    before = bytes_alive()
    with profiler.profile(profile_memory=True, use_kineto=True) as profile:
        step()
    return before, most_at_once(_events(profile.kineto_results.experimental_event_tree()), set(_storages()))


def most_at_once(events: Iterable[Event], left: Container[int]) -> int:
    """Return the most bytes that lay there at once, by allocations and releases in their order.

    Args:
        left: addresses of what is there after the last event. A block that is not, and whose release is not among the
            events, does not count.
    """
    changes, open_at = [], {}
    for address, size in events:
        if size > 0:
            if address in open_at:  # its release was not seen
                changes[open_at[address]] = 0
            open_at[address] = len(changes)
        else:
            open_at.pop(address, None)
        changes.append(size)
    for address, place in open_at.items():
        if address not in left:
            changes[place] = 0
    return max(accumulate(changes, initial=0))


def _events(tree: Iterable[Any]) -> list[Event]:
    """Return address and change of each allocation and release that the profiler has seen, by time."""
    found, stack = [], list(tree)
    while stack:
        event = stack.pop()
        stack += event.children
        if event.name == "[memory]":
            found.append((event.start_time_ns, event.extra_fields.ptr, event.extra_fields.alloc_size))
    return [(address, size) for _, address, size in sorted(found, key=lambda each: each[0])]


def bytes_alive() -> int:
    """Return the bytes of all tensors that Python can reach, those that share memory counted once."""
    return sum(_storages().values())


def _storages() -> dict[int, int]:
    """Return address and bytes of the memory of all tensors that Python can reach."""
    gc.collect()
    storages: dict[int, int] = {}
    for thing in gc.get_objects():
        if issubclass(type(thing), torch.Tensor) and not isinstance(thing, FakeTensor):
            for tensor in (thing, thing.grad if thing.is_leaf else None):
                if tensor is not None and tensor.device.type == "cpu" and tensor.layout is torch.strided:
                    storage = tensor.untyped_storage()
                    storages[storage.data_ptr()] = storage.nbytes()
    return storages
