"""One step under torch's profiler: what it holds in tensors, the kernels that take longest, the attention torch chose.

Memory: bytes that lie there before the step, and the most that it adds. The added bytes are counted in torch's own
allocator, each allocation and release by address and size (``profile_memory``); what the system's allocator keeps is no
part of it. The profiler hears of this thread alone, and what a message held may be released in one of gloo's: such a
block, which is gone after the step though nobody saw it go, is left out. Not to be used in a step that is timed.

Kernels are what ran on the device; on a CPU, which has none, its operators. An operator's own time on the device is
that of the kernels that it starts, so the two are never summed together.
"""

from __future__ import annotations

import gc
import re
from collections import Counter
from collections.abc import Callable, Container, Iterable
from itertools import accumulate
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor  # a trace of torch.compile may leave some
from torch.autograd import profiler
from torch.nn.attention import SDPBackend
from torch.overrides import TorchFunctionMode
from torch.profiler import ProfilerActivity, profile

Event = tuple[int, int]
"""Address, and by how many bytes what lies there changes."""


def measure(step: Callable[[], Any]) -> tuple[int, int]:
    """Return (bytes of tensors alive before ``step``, the most that lay there beyond them while it ran)."""
    before = bytes_alive()
    with profiler.profile(profile_memory=True, use_kineto=True) as taken:
        step()
    return before, most_at_once(_events(taken.kineto_results.experimental_event_tree()), set(_storages()))


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


SHOWN = 10
LONGEST_NAME = 160
ATTENTION = re.compile(r"flash|fmha|sdpa|attention", re.IGNORECASE)
"""In the names of the kernels of all of torch's fused attentions, forward and backward."""


def look(step: Callable[[], Any], kind: str) -> dict[str, Any]:
    """Take one step and return what it is spent on.

    ``kernels`` are the longest ones with name, milliseconds, share of all kernels' time and calls; ``kernels_ms`` is
    all of them; ``attention_kernels`` are the names of those of attention; ``attention`` is what torch chose for each
    shape, as torch._fused_sdp_choice says.
    """
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if kind == "cuda" else [])]
    with _Attention() as seen, profile(activities=activities) as taken:
        step()
        if kind == "cuda":
            torch.cuda.synchronize()
    return {**kernels_of(taken.key_averages(), kind), "attention": seen.as_data()}


def kernels_of(averages: Iterable[Any], kind: str) -> dict[str, Any]:
    """Return ``kernels``, ``kernels_ms`` and ``attention_kernels`` of a profile's ``key_averages()``."""
    on_cpu = torch.autograd.DeviceType.CPU
    times = [
        (each.key, each.self_cpu_time_total if kind == "cpu" else each.self_device_time_total, each.count)
        for each in averages
        if (each.device_type == on_cpu) == (kind == "cpu") and not each.is_user_annotation
    ]
    times.sort(key=lambda each: (-each[1], each[0]))
    whole = sum(time for _, time, _ in times)
    kernels = [
        {"name": name[:LONGEST_NAME], "ms": time / 1e3, "share": time / whole if whole else 0.0, "count": count}
        for name, time, count in times[:SHOWN]
    ]
    attention = [name[:LONGEST_NAME] for name, _, _ in times if ATTENTION.search(name)]
    return {"kernels": kernels, "kernels_ms": whole / 1e3, "attention_kernels": attention}


class _Attention(TorchFunctionMode):
    """Notes for each call of torch's attention what torch chooses for it; the call goes on as it is."""

    def __init__(self) -> None:
        super().__init__()
        self._calls: Counter[tuple[Any, ...]] = Counter()

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        if function is torch.nn.functional.scaled_dot_product_attention:
            query, key = args[0], args[1]
            chosen = SDPBackend(torch._fused_sdp_choice(*args, **given)).name
            has_mask = (given.get("attn_mask") if len(args) < 4 else args[3]) is not None
            self._calls[chosen, tuple(query.shape), tuple(key.shape), str(query.dtype), has_mask] += 1
        return function(*args, **given)

    def as_data(self) -> list[dict[str, Any]]:
        return [
            {"kernel": kernel, "query": list(query), "key": list(key), "dtype": dtype, "has_mask": mask, "calls": calls}
            for (kernel, query, key, dtype, mask), calls in self._calls.items()
        ]
