"""The feed-forward half of a layer."""

from __future__ import annotations

import torch
from torch import nn

from megatron.model.sizes import Place, Sizes
from megatron.mpu.layers import ColumnParallelLinear, RowParallelLinear
from megatron.ops.activations import activation, is_gated


class GatedLinear(ColumnParallelLinear):
    """The two products of a gated feed-forward half: its gate and its value.

    Their weights are one matrix whose rows take turns (the first of the gate, the first of the value, the second of the
    gate), so that any contiguous cut into pairs gives each rank as much of both.

    Shapes:
        input  [s, b, input_size], the same on every rank
        output 2 x [s, b, output_size/2t]
    """

    num_outputs = 2

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        """Two products with every second row, for a product with all would leave two tensors full of gaps."""
        gate, value = self.weight.unflatten(0, (-1, 2)).unbind(1)  # 2 x [output_size/2t, input_size]
        gate_bias, value_bias = (None, None) if self.bias is None else self.bias.unflatten(0, (-1, 2)).unbind(1)
        gated, values = self.products(x, (gate, gate_bias), (value, value_bias))
        return gated, values


class MLP(nn.Module):
    """Up to the feed-forward size, activation, down again: ``down(activation(up(x)))``.

    A gated one has two products up, ``down(activation(gate(x)) * value(x))``.

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
        kind, rows = (GatedLinear, 2 * f) if self.is_gated else (ColumnParallelLinear, f)
        self.up = kind(h, rows, bias=sizes.hidden_bias, **place.cut)
        self.activation = activation(sizes.activation)
        self.down = RowParallelLinear(f, h, bias=sizes.hidden_bias, **place.cut)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.is_gated:
            gate, value = self.up(x)  # 2 x [s, b, f/t]
            hidden = self.activation(gate) * value
        else:
            hidden = self.activation(self.up(x))  # [s, b, f/t]
        return self.down(self._dropped(hidden))

    def _dropped(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.place.streams.dropout(
            hidden,
            self.dropout,
            training=self.training,
            layer=self.layer,
            site="activation",
            is_cut=self.place.group.size > 1,
        )
