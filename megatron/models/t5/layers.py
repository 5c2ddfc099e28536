"""T5 layers: relative bias, self-attention and cross-attention, encoder layer and decoder layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from megatron.models.common.attention import Attention, SelfAttention
from megatron.models.common.kv_cache import LayerKVCache
from megatron.models.common.model_args import ModelArgs
from megatron.models.common.norms import LayerNorm, RMSNorm, add_and_norm
from megatron.models.common.parallel_context import ParallelContext
from megatron.models.common.transformer import MLP
from megatron.mpu.layers import ColumnParallelLinear, RowParallelLinear, divide
from megatron.mpu.matrices import set_matrices
from megatron.mpu.shard import Shard, empty_weight
from megatron.ops.attention import attention, document_mask, mask_value, segment_mask
from megatron.ops.biased_attention import biased_attention, mask_future
from megatron.ops.positions import relative_buckets
from tds.grad_norm import accurate_dtype


@dataclass(frozen=True, kw_only=True)
class T5ModelArgs(ModelArgs):
    """Sizes and switches for an encoder-decoder model; ``num_layers`` is per side, like the flag."""

    family: str = "t5"
    enc_layers: int
    dec_layers: int
    position_embedding_type: str = "relative"
    relative_attention_num_buckets: int = 32
    relative_attention_max_distance: int = 128

    @property
    def is_relative(self) -> bool:
        """True for T5 with relative positions, False for CPM's variant with learned positions."""
        return self.position_embedding_type == "relative"


# Self-attention and cross-attention.


class RelativeBias(nn.Module):
    """Learned score bias, per head and distance bucket. All layers on a side share it.

    Shapes:
        weight [buckets, a/t]

    Source: Raffel et al. 2020, "Exploring the limits of transfer learning", section 2.1.
    """

    def __init__(self, args: T5ModelArgs, parallel: ParallelContext, is_bidirectional: bool) -> None:
        super().__init__()
        self.num_buckets = args.relative_attention_num_buckets
        self.max_distance = args.relative_attention_max_distance
        self.is_bidirectional = is_bidirectional
        local_heads = divide("--num-attention-heads", args.num_attention_heads, parallel.group)
        shard = Shard((self.num_buckets, args.num_attention_heads), 1, parallel.group.rank * local_heads, local_heads)
        self.weight = empty_weight((self.num_buckets, local_heads), shard)

    def by_distance(self, size: int) -> torch.Tensor:
        """Return the bias by distance (key position minus query position), from -(size - 1) to size - 1.

        A row's gradient is a sum over many distances; it is accumulated in fp32 for 16-bit weights.

        Shapes:
            output [a/t, 2 size - 1]
        """
        distances = torch.arange(1 - size, size, device=self.weight.device)
        buckets = relative_buckets(
            distances,
            num_buckets=self.num_buckets,
            max_distance=self.max_distance,
            is_bidirectional=self.is_bidirectional,
        )
        weight = self.weight.to(accurate_dtype(self.weight.dtype))
        return weight[buckets].t().to(self.weight.dtype)

    def for_queries(self, num_queries: int, num_keys: int) -> torch.Tensor:
        """Return the bias for the last ``num_queries`` positions with all ``num_keys`` positions.

        Shapes:
            output [a/t, s, s_k]
        """
        windows = self.by_distance(num_keys).unfold(1, num_keys, 1)  # [a/t, s_k, s_k], the last query first
        return windows[:, :num_queries].flip(1)


class T5SelfAttention(SelfAttention):
    """Self-attention that adds the relative bias ``table`` to unscaled scores; without a table, scores are scaled.

    Shapes:
        x      [s, b, h]
        mask   bool [b, 1, s, s], True where a query may attend (including the causal mask), or None
        output [s, b, h]

    A ``cache`` works as in ``SelfAttention``; with a relative bias all rows must be at the same positions.
    """

    def __init__(self, args: T5ModelArgs, parallel: ParallelContext, layer: int, *, is_causal: bool) -> None:
        super().__init__(args, parallel, layer)
        self.is_causal = is_causal

    def forward(  # type: ignore[override]
        self,
        x: torch.Tensor,
        mask: torch.Tensor | None = None,
        table: RelativeBias | None = None,
        cache: LayerKVCache | None = None,
    ) -> torch.Tensor:
        query, key, value = self.split_heads(self.query_key_value(x), 3)  # 3 x [b, a/t, s, d]
        if cache is not None:
            key, value = cache.update(key, value)  # 2 x [b, a/t, s_k, d]
        is_causal = self.is_causal and mask is None
        if table is None:
            context = self.attend(attention, query, key, value, mask=mask, is_causal=is_causal)
        elif key.shape[2] > query.shape[2]:
            bias = table.for_queries(query.shape[2], key.shape[2])  # [a/t, s, s_k]
            masked_bias = bias if mask is None else bias.masked_fill(~mask, mask_value(bias.dtype))
            context = self.attend(attention, query, key, value, mask=masked_bias, is_causal=False, scale=1.0)
        else:
            bias = table.by_distance(query.shape[2])  # [a/t, 2s - 1]
            bias = mask_future(bias) if is_causal else bias
            context = self.attend(biased_attention, query, key, value, bias, mask=mask)
        return self.dense(context)


class CrossAttention(Attention):
    """Multi-head attention to the encoder's output, without a relative bias.

    Shapes:
        x      [s_d, b, h], or this rank's sequence shard, depending on ``parallel``
        memory [s_e, b, h]; with sequence parallelism the output of ``gather_memory``
        mask   bool [b, 1, s_d, s_e], True where a query may attend, or None
        output as x

    A ``cache`` stores keys and values for ``memory`` in the first pass; later passes need no memory.
    """

    def __init__(self, args: T5ModelArgs, parallel: ParallelContext, layer: int) -> None:
        super().__init__(args, parallel, layer, site="cross attention")
        h, width, bias = args.hidden_size, args.attention_width, args.hidden_bias
        self.shares = (1,) if parallel.sequence_parallel else ()  # for the debugger: memory's gradient is a partial sum
        self.scale = 1.0 if args.is_relative else self.head_size**-0.5
        self.query = ColumnParallelLinear(h, width, bias=bias, **parallel.layer_kwargs)
        self.key_value = ColumnParallelLinear(
            h, 2 * width, bias=bias, group=parallel.group, has_entered=parallel.sequence_parallel
        )
        set_matrices(self.query.weight, head=self.head_size)
        set_matrices(self.key_value.weight, (self.head_size, self.head_size), head=self.head_size)
        self.dense = RowParallelLinear(width, h, bias=bias, **parallel.layer_kwargs)

    def forward(
        self,
        x: torch.Tensor,
        memory: torch.Tensor | None,
        mask: torch.Tensor | None = None,
        cache: LayerKVCache | None = None,
    ) -> torch.Tensor:
        (query,) = self.split_heads(self.query(x), 1)  # [b, a/t, s_d, d]
        key, value = self._key_value(memory, cache)
        query = query if self.scale == 1.0 else query * self.scale
        return self.dense(self.attend(biased_attention, query, key, value, mask=mask))

    def _key_value(self, memory: torch.Tensor | None, cache: LayerKVCache | None) -> tuple[torch.Tensor, torch.Tensor]:
        if cache is not None and cache.cross_attention is not None:
            return cache.cross_attention
        key, value = self.split_heads(self.key_value(memory), 2)  # 2 x [b, a/t, s_e, d]
        if cache is not None:
            cache.cross_attention = key, value = key.contiguous(), value.contiguous()
        return key, value


def make_norm(args: T5ModelArgs, parallel: ParallelContext) -> nn.Module:
    """Build a norm for hidden states: RMSNorm with relative positions, LayerNorm with learned positions."""
    norm_class = RMSNorm if args.is_relative else LayerNorm
    return parallel.mark_sequence_parallel(norm_class(args.hidden_size, args.layernorm_epsilon))


# Encoder layer and decoder layer.


class T5Layer(nn.Module):
    """Base class for encoder and decoder layers: pre-norm blocks ``x + dropout(f(norm(x)))``, feed-forward last.

    With relative positions there is also dropout after the activation.

    Args:
        layer: layer index in the full model, encoder first; part of the dropout keys.
    """

    def __init__(self, args: T5ModelArgs, parallel: ParallelContext, layer: int, *, is_causal: bool) -> None:
        super().__init__()
        self.layer = layer
        self.hidden_dropout = args.hidden_dropout
        self.parallel = parallel
        self.input_norm = make_norm(args, parallel)
        self.attention = T5SelfAttention(args, parallel, layer, is_causal=is_causal)
        self.post_attention_norm = make_norm(args, parallel)
        self.mlp = MLP(args, parallel, layer, dropout=args.hidden_dropout if args.is_relative else 0.0)

    def apply_self_attention(
        self,
        x: torch.Tensor,
        mask: torch.Tensor | None,
        table: RelativeBias | None,
        cache: LayerKVCache | None = None,
    ) -> torch.Tensor:
        """Apply the self-attention block, including its residual connection."""
        x, normed = add_and_norm(self.input_norm, x, None, self.parallel)
        return self.add(x, self.attention(normed, mask, table, cache), "attention output")

    def apply_feed_forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the feed-forward block, including its residual connection."""
        x, normed = add_and_norm(self.post_attention_norm, x, None, self.parallel)
        return self.add(x, self.mlp(normed), "mlp output")

    def add(self, residual: torch.Tensor, branch: torch.Tensor, site: str) -> torch.Tensor:
        """Add ``branch``, a block's output after dropout, to ``residual``."""
        return self.parallel.dropout(
            branch, self.hidden_dropout, training=self.training, layer=self.layer, site=site, residual=residual
        )


class T5EncoderLayer(T5Layer):
    """Encoder layer: bidirectional self-attention and feed-forward.

    Shapes:
        x        [s_e, b, h], or this rank's sequence shard, depending on ``parallel``
        segments [b, s_e] document by position, -1 for padding; if given, attention stays within documents
        output   as x
    """

    def __init__(self, args: T5ModelArgs, parallel: ParallelContext, layer: int) -> None:
        super().__init__(args, parallel, layer, is_causal=False)

    def forward(
        self, x: torch.Tensor, table: RelativeBias | None = None, segments: torch.Tensor | None = None
    ) -> torch.Tensor:
        mask = None if segments is None else segment_mask(segments, segments)
        return self.apply_feed_forward(self.apply_self_attention(x, mask, table))


class T5DecoderLayer(T5Layer):
    """Decoder layer: causal self-attention, cross-attention and feed-forward.

    Shapes:
        x      [s_d, b, h], or this rank's sequence shard, depending on ``parallel``
        memory [s_e, b, h]
        enc_segments [b, s_e], dec_segments [b, s_d]: both or none; a document attends only to its part of ``memory``
        output as x

    With a ``cache``, used as in ``SelfAttention`` and ``CrossAttention``, each decoder row is one document.
    """

    def __init__(self, args: T5ModelArgs, parallel: ParallelContext, layer: int) -> None:
        super().__init__(args, parallel, layer, is_causal=True)
        self.shares: tuple[int, ...] = (1,) if parallel.sequence_parallel else ()  # as in ``CrossAttention``
        self.cross_norm = make_norm(args, parallel)
        self.cross_attention = CrossAttention(args, parallel, layer)

    def forward(
        self,
        x: torch.Tensor,
        memory: torch.Tensor | None,
        table: RelativeBias | None = None,
        enc_segments: torch.Tensor | None = None,
        dec_segments: torch.Tensor | None = None,
        cache: LayerKVCache | None = None,
    ) -> torch.Tensor:
        self_mask, cross_mask = None, None
        if enc_segments is not None and dec_segments is not None:
            self_mask, cross_mask = document_mask(dec_segments), segment_mask(dec_segments, enc_segments)
        if cache is not None:
            self_mask = cache.slots.mask
        x = self.apply_self_attention(x, self_mask, table, cache)
        x, normed = add_and_norm(self.cross_norm, x, None, self.parallel)
        x = self.add(x, self.cross_attention(normed, memory, cross_mask, cache), "cross attention output")
        return self.apply_feed_forward(x)
