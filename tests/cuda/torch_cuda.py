"""Functions of ``torch.cuda`` and ``torch.accelerator`` that describe the simulated device."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch

TOTAL_BYTES = 140 * 2**30
PROPERTIES = types.SimpleNamespace(
    name="simulated CUDA device", total_memory=TOTAL_BYTES, major=9, minor=0, multi_processor_count=132,
    uuid=None, pci_domain_id=0, pci_bus_id=0, pci_device_id=0,
)  # fmt: skip
ANSWERS: dict[str, Any] = {
    "is_available": True, "device_count": 1, "current_device": 0, "is_initialized": True, "_lazy_init": None,
    "init": None, "manual_seed": None, "manual_seed_all": None, "seed_all": None, "empty_cache": None,
    "get_device_name": PROPERTIES.name, "get_device_properties": PROPERTIES, "get_device_capability": (9, 0),
    "is_bf16_supported": True, "memory_allocated": 0, "max_memory_allocated": 0, "memory_reserved": 0,
    "max_memory_reserved": 0, "memory_cached": 0, "max_memory_cached": 0, "memory_stats": {},
    "mem_get_info": (TOTAL_BYTES, TOTAL_BYTES), "reset_peak_memory_stats": None, "reset_max_memory_allocated": None,
    "reset_max_memory_cached": None, "set_device": None, "is_current_stream_capturing": False,
    "_is_in_bad_fork": False,
}  # fmt: skip
ACCELERATOR_ANSWERS: dict[str, Any] = {
    "get_memory_info": (TOTAL_BYTES, TOTAL_BYTES), "memory_reserved": 0, "max_memory_allocated": 0,
    "memory_allocated": 0, "memory_stats": {}, "empty_cache": None, "reset_peak_memory_stats": None,
}  # fmt: skip


def returning(value: Any) -> Callable[..., Any]:
    """Return a function that returns ``value``."""
    return lambda *args, **kwargs: value


def install() -> None:
    """Replace the functions of torch for the rest of the process."""
    cuda, accelerator = torch.cuda, torch.accelerator
    for name, value in ANSWERS.items():
        setattr(cuda, name, returning(value))
    for name, value in ACCELERATOR_ANSWERS.items():
        setattr(accelerator, name, returning(value))
    cuda.default_generators = (torch.Generator(),)
    cuda.get_rng_state = lambda *_: cuda.default_generators[0].get_state()
    cuda.set_rng_state = lambda state, *_: cuda.default_generators[0].set_state(state)
    cuda.current_stream = cuda.default_stream = lambda device=None: accelerator.current_stream()
    cuda.synchronize = lambda device=None: accelerator.synchronize()
    cuda.nccl.version = returning((2, 27, 3))
    for name in ("range_push", "range_pop", "mark"):
        setattr(cuda.nvtx, name, returning(None))
