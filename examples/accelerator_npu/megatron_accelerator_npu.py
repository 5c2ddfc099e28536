"""A device "npu": Ascend NPUs through torch-npu. It has not run on an NPU; docs/accelerators.md states what is checked.

``torch_npu`` renames PyTorch's PrivateUse1 to "npu", registers ``torch.npu`` and the backend "hccl". This file uses
names of ``torch.npu`` that torch-npu 2.13.0 defines in Python. torch-npu needs the torch release with the same version
number. DeepSpeed has an accelerator object for "npu".
"""

from __future__ import annotations

from typing import Any

import torch

from megatron.accelerators import Accelerator, register

NAME = "npu"


def prepare() -> None:
    import torch_npu  # noqa: F401 - registers "npu" and "hccl"; torch imports it automatically if it is installed


def is_available() -> bool:
    """Return True if torch-npu can be imported, which needs the CANN toolkit, and finds an NPU."""
    try:
        prepare()
    except (ImportError, OSError):  # not installed; a library of CANN is missing
        return False
    return bool(torch.npu.is_available())


def bind(device_type: str, local_rank: int) -> torch.device:
    """Make NPU ``local_rank`` the current device and initialize torch-npu in this process.

    Raises:
        ValueError: this process sees fewer NPUs.
    """
    num_devices = torch.npu.device_count()
    if local_rank >= num_devices:
        raise ValueError(
            f"LOCAL_RANK must be below the number of NPUs that this process sees, got {local_rank} and {num_devices}. "
            "Start as many ranks on each node as it has NPUs, and check ASCEND_RT_VISIBLE_DEVICES"
        )
    torch.npu.set_device(local_rank)
    torch.npu.init()
    return torch.device(device_type, local_rank)


def default_precision(device_type: str) -> str:
    """Return "bf16" if the NPU supports it (Ascend 910B and newer), otherwise "fp16"."""
    return "bf16" if torch.npu.is_bf16_supported() else "fp16"


def default_generator(torch_device: torch.device) -> torch.Generator:
    """Return the NPU's generator; ``torch.npu.default_generators`` is empty until torch-npu is initialized."""
    torch.npu.init()
    index = torch.npu.current_device() if torch_device.index is None else torch_device.index
    generator: torch.Generator = torch.npu.default_generators[index]
    return generator


HOOKS: dict[str, Any] = {
    "bind": bind,
    "name": lambda device_type: torch.npu.get_device_name(),
    "model_name": lambda torch_device: torch.npu.get_device_name(torch_device),
    "identity": lambda torch_device: "",  # torch-npu's Python files provide no device identifier
    "default_precision": default_precision,
    "can_pin": lambda device_type: False,  # synchronous copies, until copies from pinned memory have run on an NPU
    "synchronize": lambda device_type: torch.npu.synchronize(),
    "finish_copies": lambda torch_device: torch.npu.current_stream(torch_device).synchronize(),
    "is_busy": lambda torch_device: not torch.npu.default_stream(torch_device).query(),
    "default_generator": default_generator,
    "peak_memory_bytes": lambda device_type: torch.npu.max_memory_allocated(),
    "total_memory_bytes": lambda device_type: torch.npu.mem_get_info()[1],
}

register(
    Accelerator(
        name=NAME,
        is_available=is_available,
        backend="cpu:gloo,npu:hccl",
        dtypes=("bf16", "fp16", "fp32"),
        prepare=prepare,
        hooks=HOOKS,
        module=__name__,
    )
)
