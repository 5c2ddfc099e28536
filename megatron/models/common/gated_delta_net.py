"""Gated DeltaNet, the recurrent mixer of Qwen3-Next, Qwen3.5 and OLMo Hybrid."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from megatron.models.common.delta_mixer import DeltaInputs, DeltaMixer, head_parameter
from megatron.models.common.head_projections import HeadProjections, HeadRows
from megatron.models.common.initial_values import TimeStepBias
from megatron.models.common.model_args import ModelArgs
from megatron.models.common.parallel_context import ParallelContext


class GatedDeltaNet(DeltaMixer):
    """Gated delta rule with a decay per head: ``exp(-exp(A_log) softplus(decay + dt_bias))``.

    ``decay``, ``beta`` and ``gate`` are projections of the input. Beta is ``sigmoid(beta)``, doubled with
    ``--linear-allow-neg-eigval``. The output gate is ``silu(gate)``.

    Shapes and arguments: as in ``DeltaMixer``.

    Attributes:
        dt_bias: [a/t].

    Source: Yang et al. 2025, "Gated delta networks: improving Mamba2 with delta rule"; Grazzi et al. 2025, "Unlocking
    state-tracking in linear RNNs through negative eigenvalues".
    """

    def __init__(self, args: ModelArgs, parallel: ParallelContext, layer: int) -> None:
        super().__init__(args, parallel, layer, F.silu)
        self.beta_scale = 2.0 if args.linear_allow_neg_eigval else 1.0
        num_heads = args.linear_num_value_heads
        key_rows = HeadRows(args.linear_num_key_heads, self.key_size)
        value_rows = HeadRows(num_heads, self.value_size)
        parts = {
            "query": key_rows, "key": key_rows, "value": value_rows, "gate": value_rows,
            "beta": HeadRows(num_heads, 1), "decay": HeadRows(num_heads, 1),
        }  # fmt: skip
        self.projections = HeadProjections(args.hidden_size, parts, parallel)
        self.dt_bias = head_parameter(num_heads, parallel.group, TimeStepBias())

    def project(self, x: torch.Tensor) -> DeltaInputs:
        query, key, value, gate, beta, decay = self.projections(x)
        dtype = torch.promote_types(decay.dtype, torch.float32)
        time_step = F.softplus(decay.to(dtype) + self.dt_bias.to(dtype))  # [s, b, a/t]
        log_decay = -self.A_log.to(dtype).exp() * time_step
        return DeltaInputs(torch.cat((query, key, value), -1), gate, torch.sigmoid(beta) * self.beta_scale, log_decay)
