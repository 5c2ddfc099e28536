"""Sums of whole gradients over the replicas that are on their way while other work goes on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from megatron.optim.gradients import multiply


@dataclass(frozen=True)
class Flight:
    """``flat`` holds the sum of ``gradients``, one behind the other, once ``work`` is done."""

    gradients: Sequence[torch.Tensor]
    flat: torch.Tensor
    work: Any

    @torch.no_grad()
    def land(self, factor: float) -> None:
        """Wait for the sum, and put it times ``factor`` where the gradients lie."""
        self.work.wait()
        multiply([self.flat], factor)
        for gradient, part in zip(self.gradients, self.flat.split([g.numel() for g in self.gradients]), strict=True):
            if part.data_ptr() != gradient.data_ptr():
                gradient.copy_(part.view_as(gradient))


@torch.no_grad()
def fly(gradients: Sequence[torch.Tensor], group: dist.ProcessGroup) -> Flight:
    """Start the sum over ``group`` of gradients of one dtype, in one message. Collective.

    Raises:
        ValueError: one of them is sparse.
    """
    if any(gradient.is_sparse for gradient in gradients):
        raise ValueError("sparse gradients cannot be summed, got one; build the embedding with sparse=False")
    lies_whole = len(gradients) == 1 and gradients[0].is_contiguous()
    flat = gradients[0].view(-1) if lies_whole else torch.cat([gradient.reshape(-1) for gradient in gradients])
    return Flight(gradients, flat, dist.all_reduce(flat, group=group, async_op=True))
