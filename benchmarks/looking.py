"""One step under torch's profiler: the kernels that take longest, and which attention torch chose.

Kernels are what ran on the device; on a CPU, which has none, its operators. An operator's own time on the device is
that of the kernels that it starts, so the two are never summed together.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.nn.attention import SDPBackend
from torch.overrides import TorchFunctionMode
from torch.profiler import ProfilerActivity, profile

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
