"""The feed-forward half of a layer."""

from __future__ import annotations

import torch
from torch import nn

from megatron.model.sizes import Place, Sizes
from megatron.mpu.layers import ColumnParallelLinear, RowParallelLinear
from megatron.ops.activations import activation


class MLP(nn.Module):
    """Up to the feed-forward size, activation, down again: ``down(activation(up(x)))``.

    Shapes:
        input, output [s, b, h]
    """

    def __init__(self, sizes: Sizes, place: Place) -> None:
        super().__init__()
        h, f = sizes.hidden_size, sizes.ff_hidden_size
        self.up = ColumnParallelLinear(h, f, bias=sizes.hidden_bias, group=place.group)
        self.activation = activation(sizes.activation)
        self.down = RowParallelLinear(f, h, bias=sizes.hidden_bias, group=place.group)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.activation(self.up(x)))
