"""What of ``megatron.device`` this device does in its own way; it has no stream, no allocator and no generator."""

from __future__ import annotations

import resource
from typing import Any

import torch

from megatron import device


def _bind(kind: str, local_rank: int) -> torch.device:
    """Every process has a device of its own, its first."""
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
