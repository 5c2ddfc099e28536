"""Device-specific functions of ``megatron.device``; the device has no streams, allocator or random generator."""

from __future__ import annotations

import resource
from typing import Any

import torch

from megatron import device


def _bind(kind: str, local_rank: int) -> torch.device:
    """Return device 0: every process has its own device."""
    return torch.device(kind, 0)


HOOKS: dict[str, Any] = {
    "bind": _bind,
    "name": lambda kind: "simulated device (the CPU's kernels, in Python)",
    "can_pin": lambda kind: False,
    "synchronize": lambda kind: None,
    "finish_copies": lambda place: None,
    "is_busy": lambda place: False,
    "default_generator": lambda place: torch.default_generator,
    "peak_memory_bytes": lambda kind: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    "total_memory_bytes": lambda kind: device.total_memory_bytes("cpu"),
}
