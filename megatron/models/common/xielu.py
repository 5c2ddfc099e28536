"""XIELU: the activation of a feed-forward layer with two learned parameters."""

from __future__ import annotations

import torch
from torch import nn

from megatron.models.common.parallel_context import ParallelContext
from megatron.mpu.shard import set_partial
from megatron.ops.xielu import BETA, INITIAL_SCALE, inverse_softplus, xielu


class XIELU(nn.Module):
    """The activation ``megatron.ops.xielu`` and its parameters, which all elements of a layer share.

    Every tensor rank has both parameters. Their gradients on a rank are sums over its columns of the hidden layer, and
    are summed over the tensor-parallel group.

    Shapes:
        input, output [s, b, f/t]
    """

    def __init__(self, parallel: ParallelContext) -> None:
        super().__init__()
        self.alpha_p = nn.Parameter(torch.tensor([inverse_softplus(INITIAL_SCALE)]))
        self.alpha_n = nn.Parameter(torch.tensor([inverse_softplus(INITIAL_SCALE - BETA)]))
        if parallel.group.size > 1:
            for parameter in self.parameters():
                set_partial(parameter)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return xielu(x, self.alpha_p, self.alpha_n)
