"""Mamba2: a recurrent mixer whose state decays by a factor per head that depends on the input."""

from __future__ import annotations

import math
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from megatron.config.recurrent import GROUP_NORM, NO_NORM
from megatron.models.common.gated_group_norm import GatedGroupNorm
from megatron.models.common.initial_values import LogOfUniform, TimeStepBias
from megatron.models.common.mamba2_parts import Mamba2Parts
from megatron.models.common.mamba2_weights import Mamba2Convolution, Mamba2Projections
from megatron.models.common.model_args import ModelArgs
from megatron.models.common.parallel_context import ParallelContext
from megatron.models.common.recurrent_cache import RecurrentCache
from megatron.models.common.recurrent_context import (
    chunk_starts,
    join_chunks,
    left_tokens,
    prefix_states,
    split_chunks,
)
from megatron.mpu.layers import RowParallelLinear
from megatron.mpu.shard import Shard, empty_weight, set_shard
from megatron.ops import mamba_ssm
from megatron.ops.state_space import ChunkedStateSpace

DECAY_RATES = LogOfUniform(1.0, 16.0)
"""Initial values of ``A_log``."""


class Mamba2(nn.Module):
    """Mamba-2: a state space layer with a scalar decay per head and token.

    | tensor | computation |
    |---|---|
    | z, x, B, C, dt | projections of the input; x, B and C then pass a causal convolution and SiLU |
    | dt | ``softplus(dt + dt_bias)``, clamped to the limits of the model |
    | state of a head, [d, n] | ``S_i = exp(-exp(A_log) dt_i) S_(i-1) + dt_i x_i B_i^T`` |
    | y | ``S_i C_i + D x_i`` |
    | output | ``dense(norm(y * silu(z)))``, or another order of norm and gate (``GatedGroupNorm``) |

    Tensor ranks have a/t heads, and the groups of B and C that these heads read (``Mamba2Parts``). Context ranks
    exchange states (``megatron.models.common.recurrent_context``).

    Shapes:
        x      [s, b, h], or this rank's shard of the sequence, depending on ``parallel``
        starts int32 [b, s], the index of the first token of each token's document in the full sequence; None: the
               sequence is one document
        output as x

    ``mask`` and ``positions`` are not used. A ``cache`` contains the state and the last inputs of the convolution.

    Attributes:
        A_log, D, dt_bias: [a/t].

    Source: Dao and Gu 2024, "Transformers are SSMs: generalized models and efficient algorithms through structured
    state space duality"; multipliers: TII 2025, "Falcon-H1".
    """

    def __init__(self, args: ModelArgs, parallel: ParallelContext, layer: int) -> None:
        super().__init__()
        self.parallel, self.layer, self.multipliers = parallel, layer, args.multipliers
        self.is_recomputed = args.recompute_attention
        self.parts = Mamba2Parts(args, parallel.group)
        num_heads, width = args.mamba_num_heads, args.mamba_num_heads * args.mamba_head_dim
        self.projections = Mamba2Projections(args, parallel, self.parts)
        self.convolution = Mamba2Convolution(args, self.parts)
        num_local = self.parts.num_heads
        shard = Shard((num_heads,), 0, parallel.group.rank * num_local, num_local)
        self.A_log = empty_weight((num_local,), shard, DECAY_RATES)
        self.dt_bias = empty_weight((num_local,), shard, TimeStepBias())
        self.D = set_shard(nn.Parameter(torch.ones(num_local)), shard)
        self.time_step_limits = args.mamba_dt_limit_min, args.mamba_dt_limit_max or math.inf
        self.norm: GatedGroupNorm | None = None
        if args.mamba_norm != NO_NORM:
            is_gated_first = args.mamba_norm == GROUP_NORM
            self.norm = GatedGroupNorm(
                width, args.mamba_norm_groups, args.layernorm_epsilon, parallel.group, is_gated_first=is_gated_first
            )
        self.dense = RowParallelLinear(width, args.hidden_size, bias=args.mamba_proj_bias, **parallel.layer_kwargs)

    def forward(
        self, x: torch.Tensor, mask: torch.Tensor | None = None, cache: RecurrentCache | None = None,
        positions: torch.Tensor | None = None, starts: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        group, multipliers = self.parallel.context, self.multipliers
        projected = self.projections(scale(x, multipliers.mamba_input))
        gate, *convolved, time_step = map(scale, projected, multipliers.mamba_parts)
        starts = chunk_starts(starts, gate.shape[0], group)
        packed = split_chunks(torch.cat(convolved, dim=-1), group)  # [m b, n, a d / t + 2 g_local n]
        time_step = self._positive_time_step(split_chunks(time_step, group))  # [m b, n, a/t]
        num_left = self.convolution.kernel_size - 1
        if cache is None:
            left = left_tokens(packed, num_left, group)
        else:
            left = cache.update_conv(packed, num_left + 1)
            if (is_padding := cache.is_padding(packed.shape[1])) is not None:  # padding must not change the state
                time_step = time_step.masked_fill(is_padding.unsqueeze(2), 0.0)  # decay 1 and input 0
        value, b_t, c_t = self.convolution(packed, starts, left)
        rates = -self.A_log.to(time_step.dtype).exp()  # [a/t]
        recurrence = partial(self.recurrence, starts=starts, cache=cache)
        if self.is_recomputed and torch.is_grad_enabled():
            y = self.parallel.streams.recompute(recurrence, value, b_t, c_t, time_step, rates)
        else:
            y = recurrence(value, b_t, c_t, time_step, rates)  # [m b, n, a/t, d]
        y = (y + self.D.to(rates.dtype).unsqueeze(-1) * self._by_head(value)).flatten(2)
        y = join_chunks(y, group)  # [s, b, a d / t]
        y = y * F.silu(gate.to(y.dtype)) if self.norm is None else self.norm(y, gate)
        return scale(self.dense(y.to(gate.dtype)), multipliers.mamba_output)

    def _positive_time_step(self, projected: torch.Tensor) -> torch.Tensor:
        """Return the time step of each token and head, in fp32 or fp64."""
        dtype = torch.promote_types(projected.dtype, torch.float32)
        return F.softplus(projected.to(dtype) + self.dt_bias.to(dtype)).clamp(*self.time_step_limits)

    def recurrence(
        self,
        value: torch.Tensor,
        b_t: torch.Tensor,
        c_t: torch.Tensor,
        time_step: torch.Tensor,
        rates: torch.Tensor,
        *,
        starts: torch.Tensor | None,
        cache: RecurrentCache | None,
    ) -> torch.Tensor:
        """Return ``S_i C_i`` of this rank's chunks and update ``cache``.

        Shapes:
            value     [m b, n, a d / t]
            b_t, c_t  [m b, n, g_local n]
            time_step [m b, n, a/t], in fp32 or fp64
            rates     [a/t], ``-exp(A_log)``
            starts    int32 [m b, n], from ``chunk_starts``
            output    [m b, n, a/t, d]
        """
        value = self._by_head(value)
        b_t, c_t = (x.unflatten(-1, (self.parts.num_groups, -1)) for x in (b_t, c_t))
        has_full_sequence = cache is None and self.parallel.context.size == 1
        if has_full_sequence and mamba_ssm.is_supported(value) and self.parallel.uses_kernels(value):
            return mamba_ssm.scan(value, time_step, rates, b_t, c_t, starts)
        scan = ChunkedStateSpace(value * time_step.unsqueeze(-1), rates * time_step, b_t, c_t, starts=starts)
        if cache is not None:
            y, cache.state = scan(cache.state)
            return y
        return scan(self._initial_state(scan))[0]

    def _by_head(self, value: torch.Tensor) -> torch.Tensor:
        """Return ``value`` [m b, n, a d / t] as [m b, n, a/t, d]."""
        return value.unflatten(-1, (self.parts.num_heads, -1))

    def _initial_state(self, scan: ChunkedStateSpace) -> torch.Tensor | None:
        """Return the state before each of this rank's chunks; None: zeros. Collective with context parallelism."""
        group = self.parallel.context
        if group.size == 1:
            return None
        transition, state = scan.transition_and_state()
        return prefix_states(transition[..., None, None], state, group)


def scale(x: torch.Tensor, factor: float) -> torch.Tensor:
    """Return ``x`` multiplied by ``factor``, without an operation if it is 1."""
    return x if factor == 1.0 else x * factor
