"""PerHeadNorm: a norm of queries or keys with a weight for each head."""

from __future__ import annotations

import torch
from torch import nn

from megatron.models.common.model_args import ModelArgs
from megatron.mpu.groups import Group
from megatron.mpu.layers import divide
from megatron.mpu.shard import Shard, set_shard


class PerHeadNorm(nn.Module):
    """Norm over the elements of each head, without a bias. Each rank has the weights of its heads.

    Shapes:
        input, output [b, n/t, s, d]
        weight        [n d / t]

    Args:
        num_heads: number n of heads over all tensor ranks.

    Source: Stability AI 2024, "Stable LM 2 12B".
    """

    def __init__(self, args: ModelArgs, group: Group, num_heads: int) -> None:
        super().__init__()
        self.epsilon, self.is_offset = args.layernorm_epsilon, args.layernorm_1p
        self.is_centred = args.normalization == "LayerNorm"
        size, local_size = (
            n * args.kv_hidden_size for n in (num_heads, divide("the heads of a norm", num_heads, group))
        )
        initial_weight = torch.zeros(local_size) if self.is_offset else torch.ones(local_size)
        shard = Shard((size,), 0, group.rank * local_size, local_size)
        self.weight = set_shard(nn.Parameter(initial_weight), shard)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        upcast = x.to(torch.promote_types(x.dtype, torch.float32))
        if self.is_centred:
            upcast = upcast - upcast.mean(-1, keepdim=True)
        factor = (upcast.square().mean(-1, keepdim=True) + self.epsilon).rsqrt()  # [b, n/t, s, 1]
        weight = self.weight.to(upcast.dtype).view(x.shape[1], 1, x.shape[3])  # [n/t, 1, d]
        return (upcast * factor * (1.0 + weight if self.is_offset else weight)).to(x.dtype)
