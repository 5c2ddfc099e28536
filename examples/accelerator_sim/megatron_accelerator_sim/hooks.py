"""Device-specific functions of ``megatron.device``; the device has no streams, allocator or random generator."""

from __future__ import annotations

import resource
from typing import Any

import torch

from megatron import device


def _bind(device_type: str, local_rank: int) -> torch.device:
    """Return device 0: every process has its own device."""
    return torch.device(device_type, 0)


HOOKS: dict[str, Any] = {
    "bind": _bind,
    "name": lambda device_type: "simulated device (the CPU's kernels, in Python)",
    "can_pin": lambda device_type: False,
    "synchronize": lambda device_type: None,
    "finish_copies": lambda torch_device: None,
    "is_busy": lambda torch_device: False,
    "default_generator": lambda torch_device: torch.default_generator,
    "peak_memory_bytes": lambda device_type: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    "total_memory_bytes": lambda device_type: device.total_memory_bytes("cpu"),
}
