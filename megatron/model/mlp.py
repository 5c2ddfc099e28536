"""The feed-forward half of a layer."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from megatron.model.sizes import Place, Sizes
from megatron.mpu.layers import ColumnParallelLinear, RowParallelLinear
from megatron.mpu.mappings import copy_to_tensor_region
from megatron.ops.activations import activation, is_gated


class MLP(nn.Module):
    """Up to the feed-forward size, activation, down again: ``down(activation(up(x)))``.

    A gated one has two products up, ``down(activation(gate(x)) * value(x))``. Their weights are one matrix whose rows
    take turns (the first of the gate, the first of the value, the second of the gate), so that any contiguous cut into
    pairs gives each rank as much of both.

    Shapes:
        input, output [s, b, h]

    Args:
        layer: number of the layer, part of the key of the dropout mask.
        dropout: of what the activation returns.
    """

    def __init__(self, sizes: Sizes, place: Place, layer: int = 0, dropout: float = 0.0) -> None:
        super().__init__()
        h, f = sizes.hidden_size, sizes.ff_hidden_size
        self.is_gated = is_gated(sizes.activation)
        self.layer, self.dropout = layer, dropout
        self.place = place
        self.up = ColumnParallelLinear(h, 2 * f if self.is_gated else f, bias=sizes.hidden_bias, group=place.group)
        self.activation = activation(sizes.activation)
        self.down = RowParallelLinear(f, h, bias=sizes.hidden_bias, group=place.group)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self._gated(x) if self.is_gated else self.activation(self.up(x))  # [s, b, f/t]
        return self.down(self._dropped(hidden))

    def _gated(self, x: torch.Tensor) -> torch.Tensor:
        """Two products with every second row, for a product with all would leave two tensors full of gaps."""
        x = copy_to_tensor_region(x, self.place.group)
        gate, value = self.up.weight.unflatten(0, (-1, 2)).unbind(1)  # 2 x [f/t, h]
        gate_bias, value_bias = (None, None) if self.up.bias is None else self.up.bias.unflatten(0, (-1, 2)).unbind(1)
        return self.activation(F.linear(x, gate, gate_bias)) * F.linear(x, value, value_bias)

    def _dropped(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.place.streams.dropout(
            hidden,
            self.dropout,
            training=self.training,
            layer=self.layer,
            site="activation",
            is_cut=self.place.group.size > 1,
        )
