"""Sinks and output gates of self-attention: their parameters and shards."""

from __future__ import annotations

import torch
from torch import nn

from megatron.config.layer_features import LEARNABLE, VANILLA
from megatron.models.common.model_args import ModelArgs
from megatron.models.common.parallel_context import ParallelContext
from megatron.mpu.layers import divide
from megatron.mpu.shard import Shard, empty_weight


class Sinks(nn.Module):
    """The sinks of a layer's heads: a trained weight, or zeros with ``--softmax-type off-by-one``.

    The weight [a/t] is sharded by heads like the queries, so each tensor rank computes the complete gradient of its
    shard, and the gradient norm counts every sink once.

    Attributes:
        weight: [a/t], the shard of the weight [a]; None: all sinks are 0.
    """

    def __init__(self, args: ModelArgs, parallel: ParallelContext) -> None:
        super().__init__()
        self._parallel = parallel
        num_heads = args.num_attention_heads
        self.num_heads = divide("--num-attention-heads", num_heads, parallel.group)
        self.weight: nn.Parameter | None = None
        if args.softmax_type == LEARNABLE:
            shard = Shard((num_heads,), 0, parallel.group.rank * self.num_heads, self.num_heads)
            self.weight = empty_weight((self.num_heads,), shard)

    def forward(self, query: torch.Tensor) -> torch.Tensor:
        """Return the sinks of the heads that this rank attends with.

        With ``--cp-comm-type a2a`` these are 1/c of its heads, with a2a+p2p a share for each rank of the inner group.

        Shapes:
            query  [b, a/t, s, d]
            output [a/t] or [a/tc]
        """
        sinks = query.new_zeros(self.num_heads) if self.weight is None else self.weight
        if not self._parallel.has_sharded_heads:
            return sinks
        return sinks.chunk(self._parallel.head_group.size)[self._parallel.head_group.rank]


def make_sinks(args: ModelArgs, parallel: ParallelContext) -> Sinks | None:
    """Build the sinks of a layer; return None if its softmax has none."""
    return None if args.softmax_type == VANILLA else Sinks(args, parallel)


def split_gate(packed: torch.Tensor, num_groups: int, head_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Split the packed projection into queries, keys and values, and the output gates.

    The columns of a query group are its queries, its gates, its key and its value, as in Megatron-LM.

    Shapes:
        packed [s, b, (2 a + 2 g) d / t]
        output [s, b, (a + 2 g) d / t], [s, b, a d / t]
    """
    groups = packed.unflatten(-1, (num_groups, -1, head_size))  # [s, b, g/t, 2 a/g + 2, d]
    num_heads = groups.shape[3] // 2 - 1
    query, gate, key_and_value = groups.split([num_heads, num_heads, 2], dim=3)
    return torch.cat((query, key_and_value), dim=3).flatten(2), gate.flatten(2)
