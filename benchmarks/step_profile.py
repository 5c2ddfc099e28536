"""Profile of one step: memory of its tensors, slowest kernels, and the attention kernels that torch selects.

Memory is measured as the bytes before the step plus the peak that it adds. The added bytes are counted from the
allocations and releases of torch's allocator (``profile_memory``); memory that the system's allocator retains is not
included. The profiler observes only this thread, but threads of gloo may release message buffers. A block is therefore
ignored if it does not exist after the step and its release was not observed. Do not profile a step that is timed.

Kernels are those that ran on the device; on a CPU they are the operators. An operator's own device time equals the time
of its kernels, so the two are never added.
"""

from __future__ import annotations

import gc
import re
from collections import Counter
from collections.abc import Callable, Container, Iterable
from itertools import accumulate
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor  # torch.compile may leave fake tensors, which have no memory
from torch.autograd import profiler
from torch.nn.attention import SDPBackend
from torch.overrides import TorchFunctionMode
from torch.profiler import ProfilerActivity, profile

Event = tuple[int, int]
"""Address of a block, and the change of its size in bytes."""


def measure_memory(step: Callable[[], Any]) -> tuple[int, int]:
    """Return (bytes of tensors alive before ``step``, peak of the bytes added by it)."""
    before = live_bytes()
    with profiler.profile(profile_memory=True, use_kineto=True) as recording:
        step()
    return before, peak_bytes(_events(recording.kineto_results.experimental_event_tree()), set(_storages()))


def peak_bytes(events: Iterable[Event], remaining: Container[int]) -> int:
    """Return the peak of allocated bytes after a sequence of allocations and releases.

    Args:
        remaining: addresses of the blocks that exist after the last event. A block that was allocated in the events,
            was not released in them, and is not in ``remaining`` is ignored.
    """
    changes, open_indices = [], {}
    for address, size in events:
        if size > 0:
            if address in open_indices:  # its release was not observed
                changes[open_indices[address]] = 0
            open_indices[address] = len(changes)
        else:
            open_indices.pop(address, None)
        changes.append(size)
    for address, change_idx in open_indices.items():
        if address not in remaining:
            changes[change_idx] = 0
    return max(accumulate(changes, initial=0))


def _events(tree: Iterable[Any]) -> list[Event]:
    """Return the address and size change of each allocation and release that the profiler observed, ordered by time."""
    changes, stack = [], list(tree)
    while stack:
        event = stack.pop()
        stack += event.children
        if event.name == "[memory]":
            changes.append((event.start_time_ns, event.extra_fields.ptr, event.extra_fields.alloc_size))
    return [(address, size) for _, address, size in sorted(changes, key=lambda change: change[0])]


def live_bytes() -> int:
    """Return the bytes of all CPU tensors that Python can reach; memory shared by several tensors counts once."""
    return sum(_storages().values())


def _storages() -> dict[int, int]:
    """Return address -> bytes of the storages of all CPU tensors that Python can reach."""
    gc.collect()
    storages: dict[int, int] = {}
    for obj in gc.get_objects():
        if issubclass(type(obj), torch.Tensor) and not isinstance(obj, FakeTensor):
            for tensor in (obj, obj.grad if obj.is_leaf else None):
                if tensor is not None and tensor.device.type == "cpu" and tensor.layout is torch.strided:
                    storage = tensor.untyped_storage()
                    storages[storage.data_ptr()] = storage.nbytes()
    return storages


MAX_KERNELS = 10
MAX_NAME_LENGTH = 160
ATTENTION = re.compile(r"flash|fmha|sdpa|attention", re.IGNORECASE)
"""Pattern for the names of torch's fused attention kernels, forward and backward."""


def profile_step(step: Callable[[], Any], device_type: str) -> dict[str, Any]:
    """Profile one step.

    Returns:
        ``kernels``: the slowest kernels, with name, milliseconds, share of the time of all kernels, and calls.
        ``kernels_ms``: milliseconds of all kernels. ``attention_kernels``: names of the attention kernels.
        ``attention``: the backend that torch selects for each shape, according to torch._fused_sdp_choice.
    """
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device_type == "cuda" else [])]
    with _Attention() as attention, profile(activities=activities) as profiled:
        step()
        if device_type == "cuda":
            torch.cuda.synchronize()
    return {**kernels_of(profiled.key_averages(), device_type), "attention": attention.as_data()}


def kernels_of(averages: Iterable[Any], device_type: str) -> dict[str, Any]:
    """Return ``kernels``, ``kernels_ms`` and ``attention_kernels`` of a profile's ``key_averages()``."""
    on_cpu = torch.autograd.DeviceType.CPU
    times = [
        (
            average.key,
            average.self_cpu_time_total if device_type == "cpu" else average.self_device_time_total,
            average.count,
        )
        for average in averages
        if (average.device_type == on_cpu) == (device_type == "cpu") and not average.is_user_annotation
    ]
    times.sort(key=lambda average: (-average[1], average[0]))
    total = sum(time for _, time, _ in times)
    kernels = [
        {"name": name[:MAX_NAME_LENGTH], "ms": time / 1e3, "share": time / total if total else 0.0, "count": count}
        for name, time, count in times[:MAX_KERNELS]
    ]
    attention = [name[:MAX_NAME_LENGTH] for name, _, _ in times if ATTENTION.search(name)]
    return {"kernels": kernels, "kernels_ms": total / 1e3, "attention_kernels": attention}


class _Attention(TorchFunctionMode):
    """Records which backend torch selects for each attention call, and does not change the call."""

    def __init__(self) -> None:
        super().__init__()
        self._calls: Counter[tuple[Any, ...]] = Counter()

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        keywords = kwargs or {}
        if function is torch.nn.functional.scaled_dot_product_attention:
            query, key = args[0], args[1]
            backend = SDPBackend(torch._fused_sdp_choice(*args, **keywords)).name
            has_mask = (keywords.get("attn_mask") if len(args) < 4 else args[3]) is not None
            self._calls[backend, tuple(query.shape), tuple(key.shape), str(query.dtype), has_mask] += 1
        return function(*args, **keywords)

    def as_data(self) -> list[dict[str, Any]]:
        return [
            {"kernel": kernel, "query": list(query), "key": list(key), "dtype": dtype, "has_mask": mask, "calls": calls}
            for (kernel, query, key, dtype, mask), calls in self._calls.items()
        ]
