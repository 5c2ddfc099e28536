"""GatedNorm: the norm of a recurrent mixer's output heads, multiplied by a gate."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from megatron.models.common.norms import rms_norm
from megatron.models.common.parallel_context import ParallelContext
from megatron.mpu.shard import set_partial


class GatedNorm(nn.Module):
    """RMS norm of each head, then multiplication by ``activation(gate)``, computed in fp32 for 16-bit inputs.

    Every tensor rank has the full weight. Its gradient is a partial sum over the heads of the rank (``set_partial``).

    Shapes:
        x, gate, output [..., d_v]
        weight          [d_v]

    Source: Yang et al. 2025, "Gated delta networks", section 3.4.
    """

    def __init__(
        self,
        head_size: int,
        epsilon: float,
        activation: Callable[[torch.Tensor], torch.Tensor],
        parallel: ParallelContext,
    ) -> None:
        super().__init__()
        self.epsilon, self.activation = epsilon, activation
        self.weight = nn.Parameter(torch.ones(head_size))
        if parallel.group.size > 1:
            set_partial(self.weight)

    def forward(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        dtype = torch.promote_types(x.dtype, torch.float32)
        normed = rms_norm(x.to(dtype), self.weight.to(dtype), self.epsilon)
        return (normed * self.activation(gate.to(dtype))).to(x.dtype)
