"""DeltaMixer: the base class of recurrent mixers with the delta rule."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import nn

from megatron.models.common.gated_norm import GatedNorm
from megatron.models.common.initial_values import LogOfUniform
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
from megatron.models.common.short_convolution import ShortConvolution
from megatron.mpu.groups import Group
from megatron.mpu.layers import RowParallelLinear, divide
from megatron.mpu.shard import Shard, empty_weight
from megatron.ops.delta_rule import ChunkedDeltaRule, gated_delta_rule
from megatron.ops.fla_delta_rule import fla_delta_rule, is_available
from tds.param_info import InitialValues

L2_NORM_EPSILON = 1e-6


class DeltaInputs(NamedTuple):
    """Projections of the hidden states of this rank's tokens and heads.

    Shapes:
        qkv       [s, b, (2 g d_k + a d_v) / t], inputs of the convolution
        gate      [s, b, a d_v / t]
        beta      [s, b, a/t]
        log_decay [s, b, a/t], or [s, b, a/t, d_k] for a decay per element of the key
    """

    qkv: torch.Tensor
    gate: torch.Tensor
    beta: torch.Tensor
    log_decay: torch.Tensor


class DeltaMixer(nn.Module):
    """Recurrent mixer with the gated delta rule; subclasses project the hidden states (``project``).

    | step | computation |
    |---|---|
    | projections | queries, keys, values, gates, beta, decays |
    | convolution | ``silu(convolution(...))`` of queries, keys and values over k tokens |
    | norm | queries and keys are normalized to length 1; queries are divided by sqrt(d_k) |
    | recurrence | ``megatron.ops.delta_rule``, with g key heads and a value heads |
    | output | ``dense(norm(o) * activation(gate))`` |

    Tensor ranks have g/t key heads and their a/t value heads. Context ranks exchange states
    (``megatron.models.common.recurrent_context``).

    Shapes:
        x      [s, b, h], or this rank's shard of the sequence, depending on ``parallel``
        starts int32 [b, s], the index of the first token of each token's document in the full sequence; None: the
               sequence is one document
        output as x

    ``mask`` and ``positions`` are not used. A ``cache`` contains the state and the last inputs of the convolution.

    Attributes:
        A_log: [a/t], logarithms of the decay rates of the heads; the initial rates are uniform from
            ``smallest_decay_rate`` to 16.

    Args:
        activation: activation of the output gate.
    """

    smallest_decay_rate = 0.01

    def __init__(
        self,
        args: ModelArgs,
        parallel: ParallelContext,
        layer: int,
        activation: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        super().__init__()
        self.parallel, self.layer = parallel, layer
        self.is_recomputed = args.recompute_attention
        self.key_size, self.value_size = args.linear_key_head_dim, args.linear_value_head_dim
        num_key_heads, num_heads = args.linear_num_key_heads, args.linear_num_value_heads
        divide("--linear-num-key-heads", num_key_heads, parallel.group)
        self.num_heads = divide("--linear-num-value-heads", num_heads, parallel.group)
        key_width, value_width = num_key_heads * self.key_size, num_heads * self.value_size
        self.convolution = ShortConvolution(
            {"query": key_width, "key": key_width, "value": value_width}, args.linear_conv_kernel_dim, parallel.group
        )
        self.A_log = head_parameter(num_heads, parallel.group, LogOfUniform(self.smallest_decay_rate, 16.0))
        self.output_norm = GatedNorm(
            self.value_size, args.linear_norm_epsilon or args.layernorm_epsilon, activation, parallel
        )
        self.dense = RowParallelLinear(value_width, args.hidden_size, bias=False, **parallel.layer_kwargs)

    def project(self, x: torch.Tensor) -> DeltaInputs:
        """Return the projections of ``x``."""
        raise NotImplementedError

    def forward(
        self, x: torch.Tensor, mask: torch.Tensor | None = None, cache: RecurrentCache | None = None,
        positions: torch.Tensor | None = None, starts: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        inputs = self.project(x)
        group = self.parallel.context
        starts = chunk_starts(starts, inputs.qkv.shape[0], group)
        qkv, beta, log_decay = (split_chunks(x, group) for x in (inputs.qkv, inputs.beta, inputs.log_decay))
        num_left = self.convolution.kernel_size - 1
        if cache is None:
            left = left_tokens(qkv, num_left, group)
        else:
            left = cache.update_conv(qkv, num_left + 1)
            if (is_padding := cache.is_padding(qkv.shape[1])) is not None:  # padding must not change the state
                beta = beta.masked_fill(is_padding.unsqueeze(2), 0.0)
                log_decay = log_decay.masked_fill(is_padding.view(*is_padding.shape, *[1] * (log_decay.dim() - 2)), 0.0)
        query, key, value = self.convolution(qkv, starts, left)
        recurrence = partial(self.recurrence, starts=starts, cache=cache)
        if self.is_recomputed and torch.is_grad_enabled():
            output = self.parallel.streams.recompute(recurrence, query, key, value, log_decay, beta)
        else:
            output = recurrence(query, key, value, log_decay, beta)  # [m b, n, a/t, d_v]
        heads = join_chunks(output, group)  # [s, b, a/t, d_v]
        return self.dense(self.output_norm(heads, inputs.gate.view_as(heads)).flatten(2))

    def recurrence(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        log_decay: torch.Tensor,
        beta: torch.Tensor,
        *,
        starts: torch.Tensor | None,
        cache: RecurrentCache | None,
    ) -> torch.Tensor:
        """Apply the delta rule to this rank's chunks and update ``cache``.

        Shapes:
            query, key [m b, n, g d_k / t], value [m b, n, a d_v / t]
            log_decay  [m b, n, a/t] or [m b, n, a/t, d_k], beta [m b, n, a/t]
            starts     int32 [m b, n], from ``chunk_starts``
            output     [m b, n, a/t, d_v]
        """
        query, key = (l2_norm(x.unflatten(-1, (-1, self.key_size))) for x in (query, key))
        query, value = query * self.key_size**-0.5, value.unflatten(-1, (-1, self.value_size))
        inputs = query, key, value, log_decay, beta
        group = self.parallel.context
        if group.size > 1:
            rule = ChunkedDeltaRule(*inputs, starts=starts)
            return rule(prefix_states(*rule.transition_and_state(), group))[0]
        has_kernel = self.parallel.uses_kernels(value) and is_available(value)
        function = fla_delta_rule if has_kernel else gated_delta_rule
        output, state = function(*inputs, starts=starts, initial_state=None if cache is None else cache.state)
        if cache is not None:
            cache.state = state
        return output


def l2_norm(x: torch.Tensor) -> torch.Tensor:
    """Return ``x / sqrt(sum(x^2) + 1e-6)`` over the last dimension, in fp32 for 16-bit inputs."""
    upcast = x.to(torch.promote_types(x.dtype, torch.float32))
    return upcast * (upcast.square().sum(-1, keepdim=True) + L2_NORM_EPSILON).rsqrt()


def head_parameter(num_values: int, group: Group, initial_values: InitialValues) -> nn.Parameter:
    """Return this rank's shard [n/t] of a vector with ``num_values`` elements, ordered by head.

    It has no weight decay, like every 1-D parameter.
    """
    num_local = divide("the number of values of heads", num_values, group)
    shard = Shard((num_values,), 0, group.rank * num_local, num_local)
    return empty_weight((num_local,), shard, initial_values)
