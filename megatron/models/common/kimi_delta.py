"""Kimi Delta Attention, the recurrent mixer of Kimi Linear and bailing_hybrid (Ling 3)."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from megatron.models.common.delta_mixer import DeltaInputs, DeltaMixer, head_parameter
from megatron.models.common.head_projections import HeadProjections, HeadRows
from megatron.models.common.initial_values import TimeStepBias
from megatron.models.common.latent_attention import LatentProjection
from megatron.models.common.model_args import ModelArgs
from megatron.models.common.parallel_context import ParallelContext
from megatron.mpu.layers import ColumnParallelLinear
from megatron.mpu.mappings import enter_tensor_region


class KimiDeltaAttention(DeltaMixer):
    """Gated delta rule with a decay per element of the keys.

    The log decay is ``-exp(A_log) softplus(f + dt_bias)``; with ``--linear-decay-limit`` L it is
    ``-L sigmoid(exp(A_log) (f + dt_bias))``. f and the output gate are projections of the input: products of two
    matrices of rank d, or full matrices with ``--linear-full-rank-gates``. The gate's activation is the sigmoid.

    Shapes and arguments: as in ``DeltaMixer``. Keys and values have equal numbers of heads, with d elements each.

    Attributes:
        dt_bias: [a d / t].

    Source: Kimi Team 2025, "Kimi Linear: an expressive, efficient attention architecture", section 3.
    """

    smallest_decay_rate = 1.0

    def __init__(self, args: ModelArgs, parallel: ParallelContext, layer: int) -> None:
        super().__init__(args, parallel, layer, torch.sigmoid)
        self.decay_limit = args.linear_decay_limit
        h, rank, num_heads = args.hidden_size, self.key_size, args.linear_num_value_heads
        rows = HeadRows(num_heads, self.key_size)
        parts = {"query": rows, "key": rows, "value": rows, "beta": HeadRows(num_heads, 1)}
        self.gates_down: LatentProjection | None = None
        if args.linear_full_rank_gates:
            parts |= {"decay": rows, "gate": rows}
        else:
            # every tensor rank computes both latents, which enter the tensor-parallel region as in ``LatentAttention``
            self.gates_down = parallel.mark_sequence_parallel(LatentProjection(h, (rank, rank)))
            self.decay_up, self.gate_up = (
                ColumnParallelLinear(
                    rank, num_heads * self.key_size, bias=False, has_entered=True, **parallel.layer_kwargs
                )
                for _ in range(2)
            )
        self.projections = HeadProjections(h, parts, parallel)
        self.dt_bias = head_parameter(num_heads * self.key_size, parallel.group, TimeStepBias())

    def project(self, x: torch.Tensor) -> DeltaInputs:
        query, key, value, beta, *gates = self.projections(x)
        if self.gates_down is not None:
            latents = enter_tensor_region(self.gates_down(x), **self.parallel.layer_kwargs)  # [s, b, 2 d]
            decay_latent, gate_latent = latents.chunk(2, dim=-1)
            gates = [self.decay_up(decay_latent), self.gate_up(gate_latent)]
        decay, gate = gates  # [s, b, a d / t]
        dtype = torch.promote_types(decay.dtype, torch.float32)
        by_head = (decay.to(dtype) + self.dt_bias.to(dtype)).unflatten(-1, (-1, self.key_size))  # [s, b, a/t, d]
        rates = self.A_log.to(dtype).exp().unsqueeze(-1)  # [a/t, 1]
        if self.decay_limit:
            log_decay = -self.decay_limit * torch.sigmoid(rates * by_head)
        else:
            log_decay = -rates * F.softplus(by_head)
        return DeltaInputs(torch.cat((query, key, value), -1), gate, torch.sigmoid(beta), log_decay)
