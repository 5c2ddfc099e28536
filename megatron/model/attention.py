"""Self-attention with its heads cut over the tensor-parallel group."""

from __future__ import annotations

import contextlib

import torch
from torch import nn

from megatron.model.sizes import Place, Sizes
from megatron.mpu.layers import ColumnParallelLinear, RowParallelLinear, divide
from megatron.ops.attention import attention


class SelfAttention(nn.Module):
    """Multi-head attention of a sequence to itself.

    The query, key and value weights are one matrix whose rows are ordered by head (query, key and value of the first
    head, then of the second), so that a contiguous cut gives each rank whole heads.

    Shapes:
        x      [s, b, h]
        mask   bool [b or 1, 1, s, s] or None for causal
        output [s, b, h]
    """

    def __init__(self, sizes: Sizes, place: Place, layer: int) -> None:
        super().__init__()
        self.num_heads = divide("--num-attention-heads", sizes.num_attention_heads, place.group)
        self.head_size = sizes.kv_hidden_size
        self.layer = layer
        self.dropout = sizes.attention_dropout
        self.is_cut = place.group.size > 1
        self.streams = place.streams
        self.query_key_value = ColumnParallelLinear(
            sizes.hidden_size, 3 * sizes.attention_width, bias=sizes.hidden_bias, group=place.group
        )
        self.dense = RowParallelLinear(
            sizes.attention_width, sizes.hidden_size, bias=sizes.hidden_bias, group=place.group
        )

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        s, b, _ = x.shape
        qkv = self.query_key_value(x).view(s, b, self.num_heads, 3, self.head_size)  # [s, b, a/t, 3, d]
        query, key, value = (y.permute(1, 2, 0, 3) for y in qkv.unbind(3))  # 3 x [b, a/t, s, d]
        dropout = self.dropout if self.training else 0.0
        with self._masks(x.device, dropout):
            context = attention(query, key, value, mask=mask, dropout=dropout)  # [b, a/t, s, d]
        return self.dense(context.permute(2, 0, 1, 3).reshape(s, b, -1))  # [s, b, h]

    def _masks(self, device: torch.device, dropout: float) -> contextlib.AbstractContextManager[None]:
        if dropout == 0.0:
            return contextlib.nullcontext()
        return self.streams.generator(device, self.layer, "attention", is_cut=self.is_cut)
