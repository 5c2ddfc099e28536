"""The projections and the convolution of a Mamba-2 layer, with a separate weight for each part."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from megatron.models.common.initial_values import Uniform
from megatron.models.common.mamba2_parts import CONVOLVED, GATE, TIME_STEP, Mamba2Parts
from megatron.models.common.model_args import ModelArgs
from megatron.models.common.parallel_context import ParallelContext
from megatron.mpu.layers import column_products
from megatron.mpu.matrices import set_matrices
from megatron.ops.short_convolution import short_convolution


class Mamba2Projections(nn.Module):
    """Projections of the input to z, x, B, C and dt. Collective.

    The weight of a part is an attribute with its name, the bias an attribute such as ``z_bias``.

    Shapes:
        input  [s, b, h], or this rank's shard of the sequence
        output [s, b, a d / t] for z and x, [s, b, g_local n] for B and C, [s, b, a/t] for dt
    """

    names = GATE, *CONVOLVED, TIME_STEP

    def __init__(self, args: ModelArgs, parallel: ParallelContext, parts: Mamba2Parts) -> None:
        super().__init__()
        self.parallel, self.parts = parallel, parts
        for name in self.names:
            self.register_parameter(name, set_matrices(parts.make_weight(name, args.hidden_size)))
            self.register_parameter(f"{name}_bias", parts.make_bias(name) if args.mamba_proj_bias else None)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        pairs = []
        for name in self.names:
            weight, bias = getattr(self, name), getattr(self, f"{name}_bias")
            pairs.append((self.parts.select(name, weight), None if bias is None else self.parts.select(name, bias)))
        return column_products(x, pairs, self.parallel.group, self.parallel.sequence_parallel)


class Mamba2Convolution(nn.Module):
    """Causal depthwise convolution of x, B and C over the last k tokens of a document, then SiLU.

    The weight [rows, k] of a part is an attribute with its name, the bias an attribute such as ``x_bias``.

    Shapes:
        packed [b, s, a d / t + 2 g_local n], the channels of x, B and C
        starts int32 [b, s] or None, left [b, k - 1, channels] or None; see ``short_convolution``
        output [b, s, a d / t], [b, s, g_local n], [b, s, g_local n]
    """

    names = CONVOLVED

    def __init__(self, args: ModelArgs, parts: Mamba2Parts) -> None:
        super().__init__()
        self.parts, self.kernel_size = parts, args.mamba_conv_kernel_dim
        self.has_bias = args.mamba_conv_bias
        bound = self.kernel_size**-0.5
        for name in self.names:
            self.register_parameter(name, parts.make_weight(name, self.kernel_size, Uniform(-bound, bound)))
            self.register_parameter(f"{name}_bias", parts.make_bias(name) if self.has_bias else None)

    def forward(
        self, packed: torch.Tensor, starts: torch.Tensor | None = None, left: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, ...]:
        weight = torch.cat([self.parts.select(name, getattr(self, name)) for name in self.names])
        bias = None
        if self.has_bias:
            bias = torch.cat([self.parts.select(name, getattr(self, f"{name}_bias")) for name in self.names])
        output = F.silu(short_convolution(packed, weight, bias, starts=starts, left=left))
        return output.split([self.parts.computed_rows(name) for name in self.names], dim=-1)
