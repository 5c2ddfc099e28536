"""ShortConvolution: the causal convolution before a recurrence, with a separate weight for each part of channels."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import nn

from megatron.models.common.initial_values import Uniform
from megatron.mpu.groups import Group
from megatron.mpu.layers import divide
from megatron.mpu.shard import Shard, empty_weight
from megatron.ops.short_convolution import short_convolution


class ShortConvolution(nn.Module):
    """Causal depthwise convolution and SiLU. Each part of the channels is sharded separately, like its projection.

    Shapes:
        x      [b, s, c], the channels of all parts
        starts int32 [b, s], left [b, k - 1, c]; see ``megatron.ops.short_convolution``
        output len(parts) x [b, s, channels of the part]

    Args:
        parts: name -> number of channels over all tensor ranks; the weights are attributes with these names.
        kernel_size: number k of tokens.
    """

    def __init__(self, parts: Mapping[str, int], kernel_size: int, group: Group) -> None:
        super().__init__()
        self.kernel_size, self.names = kernel_size, tuple(parts)
        self.local_sizes = [divide(f"the channels of {name}", size, group) for name, size in parts.items()]
        for (name, size), local_size in zip(parts.items(), self.local_sizes, strict=True):
            shard = Shard((size, kernel_size), 0, group.rank * local_size, local_size)
            weight = empty_weight((local_size, kernel_size), shard, Uniform(-(kernel_size**-0.5), kernel_size**-0.5))
            self.register_parameter(name, weight)

    def forward(
        self, x: torch.Tensor, starts: torch.Tensor | None = None, left: torch.Tensor | None = None
    ) -> list[torch.Tensor]:
        weight = torch.cat([getattr(self, name) for name in self.names])
        return list(F.silu(short_convolution(x, weight, starts=starts, left=left)).split(self.local_sizes, dim=-1))
