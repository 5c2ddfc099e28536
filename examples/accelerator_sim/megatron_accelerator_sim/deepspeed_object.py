"""DeepSpeed's accelerator object for the device.

Most methods are inherited from the CPU's object; a real device would implement all methods.
"""

from __future__ import annotations

from typing import Any

import torch
from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator


class SimAccelerator(CPU_Accelerator):
    """The single device of this process, "sim:0"; it executes synchronously, and its collectives use gloo."""

    def __init__(self) -> None:
        super().__init__()
        self._name, self._communication_backend_name = "sim", "gloo"

    def device_name(self, device_index: int | None = None) -> str:
        return "sim" if device_index is None else "sim:0"

    def device(self, device_index: int | None = None) -> Any:
        return torch.device("sim", 0)

    def current_device(self) -> int:
        return 0

    def current_device_name(self) -> str:
        return "sim:0"

    def device_count(self) -> int:
        return 1

    def is_fp16_supported(self) -> bool:
        return False

    def supported_dtypes(self) -> list[torch.dtype]:
        return [torch.float32, torch.bfloat16]

    def on_accelerator(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type == "sim"
