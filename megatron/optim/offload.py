"""OffloadConfig: main params, optimizer states and weight shards in CPU memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megatron import device

HOST = torch.device("cpu")


@dataclass(frozen=True)
class OffloadConfig:
    """State that is stored on the CPU. It is a separate copy even if the model is on the CPU too.

    Args:
        optimizer: store main params and optimizer states, which are then updated on the CPU.
        parameters: store the weight shards of ZeRO 3.
        is_pinned: use pinned memory, from which a device reads faster.
    """

    optimizer: bool = False
    parameters: bool = False
    is_pinned: bool = True

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy ``tensor`` to the CPU, contiguous."""
        return self._empty_like(tensor).copy_(tensor)

    def copies(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Copy tensors to the CPU if necessary. The host synchronizes once, after all copies start."""
        copies = [t if t.device == HOST else self._empty_like(t).copy_(t, non_blocking=True) for t in tensors]
        for source in {tensor.device for tensor in tensors} - {HOST}:
            device.finish_copies(source)
        return copies

    def _empty_like(self, tensor: torch.Tensor) -> torch.Tensor:
        pin_memory = self.is_pinned and tensor.device != HOST and device.can_pin(tensor.device.type)
        return torch.empty(tensor.shape, dtype=tensor.dtype, device=HOST, pin_memory=pin_memory)


NO_OFFLOAD = OffloadConfig()
