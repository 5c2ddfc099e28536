"""What lies on the CPU while the model is on a device: offload of the optimizer, and with ZeRO 3 of the weights."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megatron import device

HOST = torch.device("cpu")


@dataclass(frozen=True)
class Offload:
    """What is kept on the CPU. Where the model is there too the copies are separate all the same.

    Args:
        optimizer: masters and moments, which are updated there.
        parameters: the parts of the weights under ZeRO 3.
        is_pinned: in pinned memory, from which a device reads faster.
    """

    optimizer: bool = False
    parameters: bool = False
    is_pinned: bool = True

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy of ``tensor`` on the CPU, in one run of memory of its own."""
        pins = self.is_pinned and tensor.device != HOST and device.can_pin(tensor.device.type)
        made = torch.empty(tensor.shape, dtype=tensor.dtype, device=HOST, pin_memory=pins)
        return made.copy_(tensor)


NOTHING = Offload()
