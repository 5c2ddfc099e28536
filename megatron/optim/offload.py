"""Main params, optimizer states and weight shards in the memory of the host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megatron import device

HOST = torch.device("cpu")


@dataclass(frozen=True)
class OffloadConfig:
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
        return self._room(tensor).copy_(tensor)

    def copies(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return a ``copy`` of each that is not there yet: started one behind the other, and waited for once."""
        made = [each if each.device == HOST else self._room(each).copy_(each, non_blocking=True) for each in tensors]
        for place in {each.device for each in tensors} - {HOST}:
            device.finish_copies(place)
        return made

    def _room(self, tensor: torch.Tensor) -> torch.Tensor:
        pins = self.is_pinned and tensor.device != HOST and device.can_pin(tensor.device.type)
        return torch.empty(tensor.shape, dtype=tensor.dtype, device=HOST, pin_memory=pins)


NOTHING = OffloadConfig()
