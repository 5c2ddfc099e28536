"""Memory for the full weights of a ZeRO 3 unit: one storage per dtype, except on a CPU.

Equally spaced weights of one shape, such as expert weights, can then be read as one tensor
(``megatron.ops.stacked_weights``). On a CPU each weight has its own storage, which is easier to allocate.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

SHARES_STORAGE: bool | None = None
"""True if the weights of a unit have one storage for each dtype; None: on devices other than the CPU."""
ALIGNMENT_BYTES = 128
"""Weights in a common storage start at multiples of this number of bytes."""


def allocate_weights(weights: Iterable[nn.Parameter]) -> tuple[dict[nn.Parameter, torch.Tensor], list[torch.Tensor]]:
    """Allocate a full tensor per weight, in order; also return tensors that span the full tensors' storages."""
    weights = list(weights)
    shares_storage = weights[0].device.type != "cpu" if SHARES_STORAGE is None else SHARES_STORAGE
    if not shares_storage:
        full = {p: torch.empty_like(p, memory_format=torch.contiguous_format).detach() for p in weights}
        return full, list(full.values())
    memory: dict[torch.dtype, torch.Tensor] = {}
    slots: dict[nn.Parameter, torch.Tensor] = {}
    for dtype in dict.fromkeys(weight.dtype for weight in weights):
        vector = ALIGNMENT_BYTES // dtype.itemsize
        numels = {p: -(-p.numel() // vector) * vector for p in weights if p.dtype == dtype}
        memory[dtype] = torch.empty(sum(numels.values()), dtype=dtype, device=weights[0].device)
        slots.update(zip(numels, memory[dtype].split(list(numels.values())), strict=True))
    return {p: slots[p][: p.numel()].view(p.shape) for p in weights}, list(memory.values())
