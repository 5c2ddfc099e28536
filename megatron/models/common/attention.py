"""Multi-head self-attention with grouped queries, rotary positions and query and key norms."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from megatron.config.decoder import ALIBI, has_sinks, has_window, query_groups
from megatron.config.layer_features import AFTER_ROTATION, has_rotary
from megatron.models.common.attention_extras import make_sinks, split_gate
from megatron.models.common.context_attention import ContextAttention
from megatron.models.common.kv_cache import LayerKVCache
from megatron.models.common.logit_meter import LogitMeter, wrap
from megatron.models.common.model_args import ModelArgs
from megatron.models.common.norms import make_head_norm
from megatron.models.common.parallel_context import ParallelContext
from megatron.models.common.rotary_positions import RotaryPositions
from megatron.mpu.layers import ColumnParallelLinear, RowParallelLinear, divide
from megatron.mpu.matrices import set_matrices
from megatron.ops import fused_rotary
from megatron.ops.attention import attention
from megatron.ops.attention_temperature import scale_queries
from megatron.ops.causal_attention import causal_self_attention, split_packed
from megatron.ops.document_attention import document_attention
from megatron.ops.padded_heads import pad_heads
from megatron.ops.positions import Rotary, alibi_slopes, apply_rotary
from megatron.ops.sink_attention import sink_attention
from megatron.ops.softcapped_attention import softcapped_attention


class Attention(nn.Module):
    """Base class of the attention layers: heads, attention dropout and recomputation.

    Args:
        site: part of the key of the dropout masks; distinguishes several attentions in one layer.
    """

    def __init__(self, args: ModelArgs, parallel: ParallelContext, layer: int, site: str = "attention") -> None:
        super().__init__()
        self.num_heads = divide("--num-attention-heads", args.num_attention_heads, parallel.group)
        self.head_size = args.kv_hidden_size
        self.layer, self.site = layer, site
        self.dropout = args.attention_dropout
        self.has_sharded_heads = parallel.group.size > 1
        self.streams = parallel.streams
        self.is_recomputed = args.recompute_attention

    def split_heads(self, packed: torch.Tensor, num_tensors: int) -> list[torch.Tensor]:
        """Split ``packed`` into ``num_tensors`` tensors; the columns of one head are contiguous.

        Shapes:
            packed [s, b, num_tensors a d / t]
            output num_tensors x [b, a/t, s, d]
        """
        return split_packed(self.view_by_head(packed, num_tensors))

    def view_by_head(self, packed: torch.Tensor, num_tensors: int) -> torch.Tensor:
        """Return ``packed`` viewed as [s, b, a/t, num_tensors, d]."""
        return packed.view(*packed.shape[:2], self.num_heads, num_tensors, self.head_size)

    def attend(
        self, function: Callable[..., torch.Tensor], query: torch.Tensor, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        """Apply an attention function with this layer's dropout masks and merge the heads.

        Shapes:
            query  [b, a/t, s, d], or [s, b, a/t, 3, d] with query, key and value packed
            output [s, b, a d / t]

        Args:
            function: attention function of ``megatron.ops``, called as ``function(query, *args, **kwargs)``.
            args: further tensors, such as key and value.
            kwargs: keyword arguments of ``function``, such as the mask.
        """
        core = partial(self._core_attention, partial(function, **kwargs))
        if self.is_recomputed and torch.is_grad_enabled():
            context = self.streams.recompute(core, query, *args)  # [b, a/t, s, d]
        else:
            context = core(query, *args)  # [b, a/t, s, d]
        return context.permute(2, 0, 1, 3).flatten(2)

    def _core_attention(self, function: Callable[..., torch.Tensor], query: torch.Tensor, *args: Any) -> torch.Tensor:
        if not self.training or self.dropout == 0.0:
            return function(query, *args)
        return self.streams.attend(
            partial(function, query, *args),
            self.dropout,
            device=query.device,
            layer=self.layer,
            site=self.site,
            is_sharded=self.has_sharded_heads,
        )


class SelfAttention(Attention):
    """Multi-head self-attention with grouped queries.

    Queries and keys have d = ``kv_hidden_size`` elements and values d_v = ``value_size``, by default the same number.
    Layers with a window may have a different number of groups from other layers, and may be the only ones with sinks.

    The query, key and value weights are one matrix with rows ordered by query group (the query heads of group 0, its
    key, its value, then group 1), so that a contiguous shard contains full groups. The number of groups must be a
    multiple of the tensor-parallel size: a key shared by several ranks would be computed on each of them, and its
    gradient would need an all-reduce.

    Shapes:
        x         [s, b, h], or this rank's shard of the sequence, depending on ``parallel``
        mask      from ``Masks``: bool [b or 1, 1, s, s] or additive [b or 1, a/t, s, s], or None for causal; or int32
                  [b, s], the start of each position's document
        positions [b, s] rotary positions, or None for 0 ... s-1
        output    as x

    With a ``cache``, keys and values of earlier passes are attended to as well, the mask is [b or 1, 1 or a/t, s, s_k],
    and positions come from the cache, which stores keys after rotary embedding.

    Source: Vaswani et al. 2017, "Attention is all you need", section 3.2.2; Su et al. 2021, "RoFormer"; Ainslie et al.
    2023, "GQA".
    """

    def __init__(self, args: ModelArgs, parallel: ParallelContext, layer: int) -> None:
        super().__init__(args, parallel, layer)
        num_heads, num_groups = args.num_attention_heads, query_groups(args, layer)
        if num_heads % num_groups:
            raise ValueError(
                f"--num-attention-heads must be a multiple of --num-query-groups, got {num_heads} and {num_groups}"
            )
        self.num_groups = divide("--num-query-groups", num_groups, parallel.group)
        self.parallel, self.clip = parallel, args.clip_qkv
        self.is_plain = args.has_plain_attention and parallel.context.size == 1
        rotary = args.local_rotary if has_window(args, layer) else args.rotary
        self.rotary_positions = RotaryPositions(args, parallel, rotary if has_rotary(args, layer) else None)
        self.is_normed_after_rotation = args.qk_norm_order == AFTER_ROTATION
        self.temperature = args.attention_temperature_scale, args.attention_temperature_floor
        self.value_size, self.value_scale = args.value_size, args.attention_value_scale
        self.multipliers = args.multipliers
        self.logit_meter: LogitMeter | None = None
        if args.measures_logits:
            window, scale = args.window_size if has_window(args, layer) else 0, args.softmax_scale
            self.logit_meter = LogitMeter(args, parallel, scale=scale or self.head_size**-0.5, window=window)
        self._set_attention_functions(args, parallel, layer)
        bias, head_size = args.hidden_bias or args.add_qkv_bias, args.kv_hidden_size
        query_rows = num_heads // num_groups * head_size
        self.has_output_gate = args.attention_output_gate
        gate_rows = (query_rows,) if self.has_output_gate else ()
        group_rows = (query_rows, *gate_rows, head_size, self.value_size)
        self.query_key_value = ColumnParallelLinear(
            args.hidden_size, num_groups * sum(group_rows), bias=bias, **parallel.layer_kwargs
        )
        set_matrices(self.query_key_value.weight, group_rows, head=head_size)
        self.sinks = make_sinks(args, parallel) if has_sinks(args, has_window=has_window(args, layer)) else None
        self.dense = RowParallelLinear(
            args.attention_width, args.hidden_size, bias=args.hidden_bias, **parallel.layer_kwargs
        )
        self.query_norm = make_head_norm(args, parallel, num_heads)
        self.key_norm = make_head_norm(args, parallel, num_groups)

    def _set_attention_functions(self, args: ModelArgs, parallel: ParallelContext, layer: int) -> None:
        """Set the attention functions for masks and for documents given by their starts."""
        has_padding = self.value_size != self.head_size
        if has_padding:  # the default scale would be that of the padded heads
            args = replace(args, softmax_scale=args.softmax_scale or self.head_size**-0.5)
        meter = self.logit_meter
        self.plain_function = causal_self_attention if meter is None else meter.wrap_packed(causal_self_attention)
        self.attention_function = wrap(_attention_function(args, layer), meter)
        self.document_function = wrap(_document_function(args, parallel, layer), meter)
        if parallel.context.size > 1:
            context_attention = ContextAttention(
                self.attention_function, self.document_function, args, parallel, self.logit_meter
            )
            self.attention_function, self.document_function = (
                context_attention,
                context_attention.attend_within_documents,
            )
        if has_padding:
            self.attention_function = pad_heads(self.attention_function)
            if parallel.context.size > 1:  # ranks exchange keys and values in one message
                self.document_function = pad_heads(self.document_function)

    def forward(
        self, x: torch.Tensor, mask: torch.Tensor | None = None, cache: LayerKVCache | None = None,
        positions: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        if self.multipliers.attention_input != 1.0:
            x = x * self.multipliers.attention_input
        packed = self.query_key_value(x)  # [s, b, (a d + g d + g d_v) / t]
        if self.is_plain and cache is None and (mask is None or mask.dtype == torch.int32):
            return self.dense(self.attend(self.plain_function, self.view_by_head(packed, 3), mask))
        y = self.dense(self._attend_unpacked(packed, mask, cache, positions))
        return y if self.multipliers.attention_output == 1.0 else y * self.multipliers.attention_output

    def _attend_unpacked(
        self,
        packed: torch.Tensor,
        mask: torch.Tensor | None,
        cache: LayerKVCache | None,
        positions: torch.Tensor | None,
    ) -> torch.Tensor:
        """Return the context [s, b, a d_v / t], computed from separate queries, keys and values."""
        if self.has_output_gate:
            packed, gate = split_gate(packed, self.num_groups, self.head_size)
            return self._attend_ungated(packed, mask, cache, positions) * torch.sigmoid(gate)
        return self._attend_ungated(packed, mask, cache, positions)

    def _attend_ungated(
        self,
        packed: torch.Tensor,
        mask: torch.Tensor | None,
        cache: LayerKVCache | None,
        positions: torch.Tensor | None,
    ) -> torch.Tensor:
        """Return the context [s, b, a d_v / t] before the output gate."""
        if self.rotary_positions.rotary is None:
            query, key, value = self._split_and_norm(packed)
        else:
            query, key, value = self._split_and_rotate(self.rotary_positions.rotary, packed, cache, positions)
        if self.value_scale != 1.0:
            value = value * self.value_scale
        if self.multipliers.key != 1.0:
            key = key * self.multipliers.key
        if self.temperature[0]:
            query_positions, _ = self.rotary_positions.of_tokens(query, cache, positions)
            query = scale_queries(query, query_positions, *self.temperature)
        if cache is not None:
            key, value = cache.update(key, value)  # [b, g/t, s_k, d], [b, g/t, s_k, d_v]
        sinks = {} if self.sinks is None else {"sinks": self.sinks(query)}
        if mask is not None and mask.dtype == torch.int32:
            return self.attend(self.document_function, query, key, value, mask, **sinks)
        return self.attend(self.attention_function, query, key, value, mask=mask, **sinks)

    def _split_and_norm(self, packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return queries, keys and values in the shapes of ``split_groups``, after the norms of queries and keys."""
        query, key, value = self.split_groups(packed)
        return *self._norm_heads(query, key), value

    def _norm_heads(self, query: torch.Tensor, key: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return queries and keys after their norms, if the model has any."""
        if self.query_norm is not None and self.key_norm is not None:
            return self.query_norm(query), self.key_norm(key)
        return query, key

    def _split_and_rotate(
        self, rotary: Rotary, packed: torch.Tensor, cache: LayerKVCache | None, positions: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return queries, keys and values.

        Queries and keys are normed and rotated by their positions; the model determines which of the two comes first.
        """
        uses_kernel = self.parallel.uses_kernels(packed) and not rotary.is_interleaved
        has_equal_heads = self.value_size == self.head_size
        if uses_kernel and has_equal_heads and (self.query_norm is None or self.is_normed_after_rotation):
            groups = self.clamp_and_group(packed).unflatten(-1, (-1, self.head_size))  # [s, b, g/t, a/g + 2, d]
            heads = groups.select(3, 0).permute(1, 2, 0, 3)
            cosine, sine = self.rotary_positions.cos_sin(heads, cache, positions)
            query, key, value = fused_rotary.split_and_rotate(groups, cosine, sine)
            return *self._norm_heads(query, key), value
        query, key, value = self.split_groups(packed)
        if not self.is_normed_after_rotation:
            query, key = self._norm_heads(query, key)
        cosine, sine = self.rotary_positions.cos_sin(query, cache, positions)
        if uses_kernel:
            query, key = fused_rotary.rotate(query, key, cosine, sine)
        else:
            query, key = (apply_rotary(x, cosine, sine, rotary.is_interleaved) for x in (query, key))
        return *(self._norm_heads(query, key) if self.is_normed_after_rotation else (query, key)), value

    def split_groups(self, packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Split ``packed`` into queries, keys and values.

        Shapes:
            packed [s, b, (a d + g d + g d_v) / t]
            output [b, a/t, s, d], [b, g/t, s, d], [b, g/t, s, d_v]
        """
        groups = self.clamp_and_group(packed)
        query_size = self.num_heads // self.num_groups * self.head_size
        # one split, so that backward concatenates the three gradients instead of adding three zero-padded tensors
        query, key, value = groups.split([query_size, self.head_size, self.value_size], dim=-1)
        query = query.unflatten(-1, (-1, self.head_size)).flatten(2, 3)  # [s, b, a/t, d]
        return query.permute(1, 2, 0, 3), key.permute(1, 2, 0, 3), value.permute(1, 2, 0, 3)

    def clamp_and_group(self, packed: torch.Tensor) -> torch.Tensor:
        """Return ``packed``, clamped if the model requires it, as [s, b, g/t, (a/g + 1) d + d_v]."""
        if self.clip:
            packed = packed.clamp(-self.clip, self.clip)
        return packed.unflatten(-1, (self.num_groups, -1))

    def query_key_factors(self, eta: torch.Tensor, alpha: float) -> Iterator[tuple[nn.Parameter, torch.Tensor]]:
        """Yield (parameter, factor of each row) for QK-clip; see ``megatron.models.common.qk_clip``.

        The heads of a group share a key, so the smallest factor ``eta`` [a/t] of the group applies to all of them.
        """
        group_eta = eta.unflatten(0, (self.num_groups, -1)).amin(1, keepdim=True)  # [g/t, 1]
        query_rows = self.num_heads // self.num_groups * self.head_size
        factors = [(group_eta**alpha, query_rows), (group_eta ** (1.0 - alpha), self.head_size)]
        unscaled = torch.ones_like(group_eta)
        if self.has_output_gate:
            factors.insert(1, (unscaled, query_rows))
        factors.append((unscaled, self.value_size))
        rows = torch.cat([factor.expand(-1, num_rows) for factor, num_rows in factors], dim=1).flatten()
        for parameter in (self.query_key_value.weight, self.query_key_value.bias):
            if parameter is not None:
                yield parameter, rows


def _attention_function(args: ModelArgs, layer: int) -> Callable[..., torch.Tensor]:
    """Return the attention function of a layer; it accepts ``mask`` and the arguments for attention dropout.

    With sinks it also requires ``sinks``.
    """
    options: dict[str, Any] = {"scale": args.softmax_scale} if args.softmax_scale else {}
    if has_sinks(args, has_window=has_window(args, layer)):
        return partial(sink_attention, cap=args.attn_logit_softcapping, **options)
    if args.attn_logit_softcapping:
        return partial(softcapped_attention, cap=args.attn_logit_softcapping, **options)
    return partial(attention, **options) if options else attention


def _document_function(args: ModelArgs, parallel: ParallelContext, layer: int) -> Callable[..., torch.Tensor]:
    """Return ``document_attention`` with the window, scale, soft-cap and slopes of ``layer``."""
    return partial(
        document_attention,
        window=args.window_size if has_window(args, layer) else 0,
        scale=args.softmax_scale or None,
        cap=args.attn_logit_softcapping,
        slopes=local_alibi_slopes(args, parallel),
    )


def local_alibi_slopes(args: ModelArgs, parallel: ParallelContext) -> list[float] | None:
    """Return the ALiBi slopes of this rank's attention heads, or None if the model has none.

    The heads of tensor rank r start at r a / t.
    """
    if args.position_embedding_type != ALIBI:
        return None
    num_heads = divide("--num-attention-heads", args.num_attention_heads, parallel.group)
    first_head = parallel.group.rank * num_heads
    num_heads //= parallel.head_group.size
    first_head += parallel.head_group.rank * num_heads
    return alibi_slopes(args.num_attention_heads, args.alibi_bias_max)[first_head : first_head + num_heads]
