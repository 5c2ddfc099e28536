"""Multi-latent attention (MLA): keys and values are projected from one latent vector per token."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from megatron.config.decoder import has_window
from megatron.models.common.attention import Attention
from megatron.models.common.kv_cache import LayerKVCache
from megatron.models.common.latent_context_attention import LatentContextAttention
from megatron.models.common.logit_meter import LogitMeter
from megatron.models.common.model_args import ModelArgs
from megatron.models.common.norms import LayerNorm, RMSNorm, norm_class, norm_kwargs
from megatron.models.common.parallel_context import ParallelContext
from megatron.models.common.rotary_positions import RotaryPositions
from megatron.mpu.layers import ColumnParallelLinear, RowParallelLinear, linear
from megatron.mpu.mappings import enter_tensor_region
from megatron.mpu.matrices import set_matrices
from megatron.mpu.shard import Shard, empty_weight
from megatron.ops.attention import attention
from megatron.ops.document_attention import document_attention
from megatron.ops.padded_heads import pad_heads
from megatron.ops.positions import apply_rotary
from megatron.ops.softcapped_attention import softcapped_attention

# What each tensor rank computes:
#
# | tensor | without sequence parallelism | with sequence parallelism | gradient |
# |---|---|---|---|
# | latents, rotated key | of all tokens, the same on every rank | of the rank's tokens, then gathered | see below |
# | queries, keys, values, context | of the rank's heads | of the rank's heads | of the rank's heads |
#
# The latents and the shared rotated key enter the tensor-parallel region together (``enter_tensor_region``): their
# gradients are sums over the heads of all ranks. After that point, without sequence parallelism, the gradients of
# down-projections and norms are complete and equal on all ranks. With sequence parallelism they are sums over the
# rank's tokens, so these weights are marked as partial (``mark_sequence_parallel``).


class LatentProjection(nn.Module):
    """Projection to latents, without a bias. Every tensor rank holds the full weight.

    Shapes:
        input  [s, b, h], or this rank's shard of the sequence
        output [s, b, sum(output_sizes)], with the tokens of the input

    Args:
        output_sizes: sizes of the outputs, each of which is a separate matrix for optimizers of matrices.
    """

    def __init__(self, input_size: int, output_sizes: tuple[int, ...]) -> None:
        super().__init__()
        shape = (sum(output_sizes), input_size)
        self.weight = empty_weight(shape, Shard(shape))
        set_matrices(self.weight, output_sizes if len(output_sizes) > 1 else ())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return linear(x, self.weight)


class KeyValueProjection(ColumnParallelLinear):
    """Projection from latents to keys (without their rotated part) and values, sharded by heads.

    The rows of a head are its key, then its value.

    Args:
        latent_size: size of a latent.
        num_heads: number of heads over all tensor ranks.
        key_size, value_size: sizes of the key and of the value of a head.
    """

    def __init__(self, latent_size: int, num_heads: int, key_size: int, value_size: int, **layer_kwargs: Any) -> None:
        output_size = num_heads * (key_size + value_size)
        super().__init__(latent_size, output_size, bias=False, has_entered=True, **layer_kwargs)
        self.key_size, self.value_size = key_size, value_size
        set_matrices(self.weight, (key_size, value_size), head=key_size + value_size)

    def forward(
        self,
        latent: torch.Tensor,
        heads: slice | None = None,
        attend: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Return the keys and values of ``heads``, by default of all heads of this rank.

        Args:
            attend: return ``attend(latent, key_weight, value_weight)`` instead, with the results of ``split_weight``.
                Weights are read here, because with ZeRO 3 a module has them only during its forward.

        Shapes:
            latent [..., latent_size]
            output [..., n (key_size + value_size)], n heads
        """
        if attend is not None:
            return attend(latent, *self.split_weight())
        if heads is None:
            return super().forward(latent)
        head_rows = self.key_size + self.value_size
        return linear(latent, self.weight[heads.start * head_rows : heads.stop * head_rows])

    def split_weight(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the weights of keys [a/t, key_size, latent_size] and of values [a/t, value_size, latent_size]."""
        by_head = self.weight.unflatten(0, (-1, self.key_size + self.value_size))
        key_weight, value_weight = by_head.split([self.key_size, self.value_size], dim=1)
        return key_weight, value_weight


class LatentAttention(Attention):
    """Multi-latent attention: a head's key is a projection of the token's latent, and a rotated part that all share.

    | tensor | computation | size per token |
    |---|---|---|
    | latent c, rotated key r | ``norm(W_c x)``, ``rotate(W_r x)`` | r_kv, d_r |
    | query of head i | ``[q_i, rotate(p_i)]`` from ``W_q norm(W_d x)``, or from ``W_q x`` without a query latent | d_n + d_r |
    | key, value of head i | ``[K_i c, r]``, ``V_i c`` | d_n + d_r, d_v |

    Queries and keys have d_n = ``qk_head_dim`` elements that are not rotated and d_r = ``qk_pos_emb_head_dim`` that
    are; values have d_v = ``v_head_dim``. A cache contains latents and rotated keys: r_kv + d_r elements per token.
    Later passes attend to the latents themselves, as ``q_i^T K_i c = (K_i^T q_i)^T c``.

    With ``--attention-output-gate``, the output of head i is multiplied by the number ``sigmoid(g_i^T x)``, as in Ling
    3; other attention has a gate for each element.

    Shapes and arguments: as in ``SelfAttention``.

    Source: DeepSeek-AI 2024, "DeepSeek-V2: a strong, economical, and efficient mixture-of-experts language model",
    section 2.1 and appendix C.
    """  # noqa: E501

    def __init__(self, args: ModelArgs, parallel: ParallelContext, layer: int) -> None:
        super().__init__(args, parallel, layer)
        self.parallel = parallel
        rotary = args.local_rotary if has_window(args, layer) else args.rotary
        self.rotary_positions = RotaryPositions(args, parallel, rotary)
        self.is_interleaved = args.rotary_interleaved
        self.part_sizes = (args.qk_head_dim, args.qk_pos_emb_head_dim)  # d_n, d_r
        self.value_size, self.kv_lora_rank = args.v_head_dim, args.kv_lora_rank
        h, num_heads = args.hidden_size, args.num_attention_heads
        self.query_down: LatentProjection | None = None
        self.query_latent_norm: LayerNorm | RMSNorm | None = None
        if args.q_lora_rank:
            self.query_down = parallel.mark_sequence_parallel(LatentProjection(h, (args.q_lora_rank,)))
            self.query_latent_norm = make_latent_norm(args, parallel, args.q_lora_rank)
        self.query = ColumnParallelLinear(
            args.q_lora_rank or h,
            num_heads * args.kv_hidden_size,
            bias=False,
            has_entered=bool(args.q_lora_rank),
            **parallel.layer_kwargs,
        )
        set_matrices(self.query.weight, self.part_sizes, head=args.kv_hidden_size)
        self.key_value_down = parallel.mark_sequence_parallel(
            LatentProjection(h, (args.kv_lora_rank, args.qk_pos_emb_head_dim))
        )
        self.key_value_latent_norm = make_latent_norm(args, parallel, args.kv_lora_rank)
        self.key_value = KeyValueProjection(
            args.kv_lora_rank, num_heads, args.qk_head_dim, args.v_head_dim, **parallel.layer_kwargs
        )
        self.dense = RowParallelLinear(args.attention_width, h, bias=False, **parallel.layer_kwargs)
        self.output_gate: ColumnParallelLinear | None = None
        if args.attention_output_gate:
            self.output_gate = ColumnParallelLinear(h, num_heads, bias=False, **parallel.layer_kwargs)
        self._set_attention_functions(args, layer)

    def _set_attention_functions(self, args: ModelArgs, layer: int) -> None:
        scale, cap = args.latent_softmax_scale, args.attn_logit_softcapping
        function: Callable[..., torch.Tensor] = partial(attention, scale=scale)
        if cap:
            function = partial(softcapped_attention, cap=cap, scale=scale)
        window = args.window_size if has_window(args, layer) else 0
        document_function: Callable[..., torch.Tensor] = partial(
            document_attention, window=window, scale=scale, cap=cap
        )
        self.logit_meter: LogitMeter | None = None
        if args.measures_logits:
            meter = self.logit_meter = LogitMeter(args, self.parallel, scale=scale, window=window)
            function, document_function = meter.wrap(function), meter.wrap(document_function)
        self.attention_function = pad_heads(function)
        self.document_function = document_function
        self.context_attention: LatentContextAttention | None = None
        if self.parallel.context.size > 1:
            self.context_attention = LatentContextAttention(
                function,
                document_function,
                replace(args, softmax_scale=scale),
                self.parallel,
                self.expand,
                self.logit_meter,
            )

    def forward(
        self, x: torch.Tensor, mask: torch.Tensor | None = None, cache: LayerKVCache | None = None,
        positions: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        query, latent, rotated_key = self._project(x, cache, positions)
        if cache is not None:
            latent, rotated_key = cache.update(latent, rotated_key)  # [b, 1, s_k, r_kv], [b, 1, s_k, d_r]
            if latent.shape[2] > query.shape[2]:
                attend_to_latents = partial(self._attend_to_latents, query, rotated_key, mask)
                return self._project_output(x, self.key_value(latent, attend=attend_to_latents))
        is_by_document = mask is not None and mask.dtype == torch.int32
        arguments: tuple[Any, ...] = (mask,) if is_by_document else ()
        kwargs: dict[str, Any] = {} if is_by_document else {"mask": mask}
        if self.context_attention is not None:
            function: Callable[..., torch.Tensor] = self.context_attention
            function = self.context_attention.attend_within_documents if is_by_document else function
            return self._project_output(x, self.attend(function, query, latent, rotated_key, *arguments, **kwargs))
        function = self.document_function if is_by_document else self.attention_function
        keys_and_values = self.expand(latent, rotated_key)
        return self._project_output(x, self.attend(function, query, *keys_and_values, *arguments, **kwargs))

    def _project_output(self, x: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
        """Return the output for the input ``x`` and the context [s, b, a d_v / t], which is gated by head."""
        if self.output_gate is not None:
            gate = torch.sigmoid(self.output_gate(x))  # [s, b, a/t]
            context = (context.unflatten(-1, (self.num_heads, -1)) * gate.unsqueeze(-1)).flatten(2)
        return self.dense(context)

    def _project(
        self, x: torch.Tensor, cache: LayerKVCache | None, positions: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return queries [b, a/t, s, d_n + d_r], latents [b, 1, s, r_kv] and rotated keys [b, 1, s, d_r]."""
        latent, rotated_key = self.key_value_down(x).split([self.kv_lora_rank, self.part_sizes[1]], dim=-1)
        parts = [self.key_value_latent_norm(latent), rotated_key]
        if self.query_down is not None and self.query_latent_norm is not None:
            parts.append(self.query_latent_norm(self.query_down(x)))
        latent, rotated_key, *query_latents = self.enter(parts)  # [s, b, r_kv], [s, b, d_r], [s, b, r_q]
        query = self.query(query_latents[0] if query_latents else x)  # [s, b, a (d_n + d_r) / t]
        query = query.unflatten(-1, (self.num_heads, -1)).permute(1, 2, 0, 3)  # [b, a/t, s, d_n + d_r]
        rotated_key = rotated_key.transpose(0, 1).unsqueeze(1)  # [b, 1, s, d_r]
        if self.rotary_positions.rotary is None:  # Kimi Linear has no positions
            return query, latent.transpose(0, 1).unsqueeze(1), rotated_key
        cosine, sine = self.rotary_positions.cos_sin(query, cache, positions)
        query_part, rotated_query = query.split(self.part_sizes, dim=-1)
        rotated_query, rotated_key = (
            apply_rotary(x, cosine, sine, self.is_interleaved) for x in (rotated_query, rotated_key)
        )
        query = torch.cat((query_part, rotated_query), dim=-1)
        return query, latent.transpose(0, 1).unsqueeze(1), rotated_key

    def enter(self, parts: list[torch.Tensor]) -> list[torch.Tensor]:
        """Let ``parts`` [s, b, size] enter the tensor-parallel region with one collective in each direction."""
        if self.parallel.group.size == 1:
            return parts
        entered = enter_tensor_region(torch.cat(parts, dim=-1), **self.parallel.layer_kwargs)
        return list(entered.split([part.shape[-1] for part in parts], dim=-1))

    def expand(
        self, latent: torch.Tensor, rotated_key: torch.Tensor, heads: slice | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the keys and values of ``heads``, by default of all heads of this rank.

        Shapes:
            latent [b, 1, s, r_kv], rotated_key [b, 1, s, d_r]
            output [b, n, s, d_n + d_r], [b, n, s, d_v], n heads
        """
        num_heads = self.num_heads if heads is None else heads.stop - heads.start
        packed = self.key_value(latent.squeeze(1).transpose(0, 1), heads)  # [s, b, n (d_n + d_v)]
        by_head = packed.unflatten(-1, (num_heads, -1)).permute(1, 2, 0, 3)  # [b, n, s, d_n + d_v]
        key, value = by_head.split([self.part_sizes[0], self.value_size], dim=-1)
        return torch.cat((key, rotated_key.expand(-1, num_heads, -1, -1)), dim=-1), value

    def query_key_factors(self, eta: torch.Tensor, alpha: float) -> Iterator[tuple[nn.Parameter, torch.Tensor]]:
        """Yield (parameter, factor of each row) for QK-clip; see ``megatron.models.common.qk_clip``.

        All heads share the rotated key, which is unchanged. Rotated queries have the full factor ``eta`` [a/t] instead.
        """
        eta = eta.unsqueeze(1)  # [a/t, 1]
        part_size, rotated_size = self.part_sizes
        query_factors = (eta**alpha).expand(-1, part_size), eta.expand(-1, rotated_size)
        yield self.query.weight, torch.cat(query_factors, dim=1).flatten()
        key_factors = (eta ** (1.0 - alpha)).expand(-1, part_size), torch.ones_like(eta).expand(-1, self.value_size)
        yield self.key_value.weight, torch.cat(key_factors, dim=1).flatten()

    def _attend_to_latents(
        self,
        query: torch.Tensor,
        rotated_key: torch.Tensor,
        mask: torch.Tensor | None,
        latent: torch.Tensor,
        key_weight: torch.Tensor,
        value_weight: torch.Tensor,
    ) -> torch.Tensor:
        """Return the context [s, b, a d_v / t], attending to cached latents as the key and value of one head.

        Shapes:
            query       [b, a/t, s, d_n + d_r]
            rotated_key [b, 1, s_k, d_r], latent [b, 1, s_k, r_kv]
            mask        bool [b, 1, s, s_k]
            key_weight  [a/t, d_n, r_kv], value_weight [a/t, d_v, r_kv]
        """
        query_part, rotated_query = query.split(self.part_sizes, dim=-1)
        latent_query = query_part @ key_weight  # [b, a/t, s, r_kv]
        query, key = torch.cat((latent_query, rotated_query), dim=-1), torch.cat((latent, rotated_key), dim=-1)
        context = self.attention_function(query, key, latent, mask=mask)  # [b, a/t, s, r_kv]
        return (context @ value_weight.transpose(1, 2)).permute(2, 0, 1, 3).flatten(2)


def make_latent_norm(args: ModelArgs, parallel: ParallelContext, size: int) -> LayerNorm | RMSNorm:
    """Build the norm of latents of ``size`` elements."""
    kwargs = {**norm_kwargs(args), "epsilon": args.latent_norm_epsilon}
    return parallel.mark_sequence_parallel(norm_class(args)(size, **kwargs))
