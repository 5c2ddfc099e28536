"""MoE: mixture-of-experts feed-forward layer with routed and shared experts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from megatron.models.common.model_args import ModelArgs
from megatron.models.common.parallel_context import ParallelContext
from megatron.models.common.router import Router, capacity_mask
from megatron.mpu.expert_parallel import Exchange, set_expert
from megatron.mpu.mappings import enter_tensor_region, gather_from_sequence_region, leave_tensor_region
from megatron.mpu.matrices import set_matrices
from megatron.mpu.shard import Shard, empty_weight, set_partial, set_shard
from megatron.ops import gated_activation
from megatron.ops.grouped import (
    GROUPED,
    DeferredGrad,
    Slots,
    add_grouped_bias,
    combine_rows,
    dispatch_rows,
    ends_of,
    grouped_linear,
    is_grouped,
    select_implementation,
)
from megatron.ops.stacked_weights import share_storage
from tds.gradients import WIDE_DTYPES
from tds.linear_function import linear

# Each expert has separate weights, named by its index: ``experts.5.up.weight`` [2f/t, h] and
# ``experts.5.down.weight`` [h, f/t], as in the grouped layers of Megatron's Transformer Engine. Code that handles
# weights by name and shard (checkpoints, ZeRO, Muon, norms, Hugging Face folders) therefore needs no rule for experts.
#
# With ``--hidden-bias``, experts have biases. The down biases are full on every tensor rank. The outputs of experts are
# summands there, so only tensor rank 0 adds the biases, and their gradients are summed over the ranks.


class MoE(nn.Module):
    """Mixture of experts: ``sum over the chosen experts e of weight_e(x) e(x)``, plus the shared expert of x.

    With ``moe_use_residual``, the two summands are weighted by the ``Coefficient`` of x.

    Shapes:
        input, output [s, b, h], or this rank's shard of the sequence, depending on ``parallel``

    Args:
        layer: index of the layer, for random numbers.
        make_mlp: builds a dense feed-forward layer from (args, parallel); called for each expert and the shared expert.

    Source: Shazeer et al. 2017, "Outrageously large neural networks"; Dai et al. 2024, "DeepSeekMoE" (shared experts);
    Gale et al. 2022, "MegaBlocks" (no token dropped); Rajbhandari et al. 2022, "DeepSpeed-MoE" (residual experts).
    """

    def __init__(
        self,
        args: ModelArgs,
        parallel: ParallelContext,
        make_mlp: Callable[[ModelArgs, ParallelContext], Any],
        layer: int = 0,
    ) -> None:
        super().__init__()
        self.model_args, self.parallel, self.layer = args, parallel, layer
        self.router = Router(args, parallel)
        expert_args = replace(args, ff_hidden_size=args.moe_ffn_hidden_size)
        num_local = args.num_experts // parallel.expert.size
        indices = range(parallel.expert.rank * num_local, (parallel.expert.rank + 1) * num_local)
        self.experts = Experts({idx: make_mlp(expert_args, parallel.for_experts) for idx in indices})
        for parameter in self.experts.parameters():
            if parallel.expert.size > 1 or parallel.has_expert_tensor_group:
                set_expert(parameter)
            if parallel.has_expert_tensor_group and parallel.for_experts.group.size == 1:
                set_shard(parameter, Shard(tuple(parameter.shape)))  # not sharded: each tensor rank has a full copy
        if parallel.for_experts.group.size > 1:
            for expert in self.experts.children():
                bias: torch.Tensor | None = expert.down.bias  # type: ignore[union-attr, assignment]
                if bias is not None:
                    set_partial(bias)
        self.shared_expert, self.shared_expert_gate, self.coefficient = None, None, None
        if args.moe_shared_expert_intermediate_size:
            self.shared_expert = make_mlp(
                replace(args, ff_hidden_size=args.moe_shared_expert_intermediate_size), parallel
            )
        if args.moe_shared_expert_gate:
            self.shared_expert_gate = parallel.mark_sequence_parallel(Gate(args.hidden_size))
        if args.moe_use_residual:
            self.coefficient = parallel.mark_sequence_parallel(Coefficient(args.hidden_size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, experts = self.router(x)  # 2 x [s, b, k]
        has_drops = self.model_args.moe_expert_capacity_factor > 0
        if has_drops:
            is_kept = capacity_mask(
                experts, weights, self.model_args, self.parallel, layer=self.layer, is_training=self.training
            )
            self.router.count_dropped(is_kept)
            experts = experts.masked_fill(~is_kept, self.model_args.num_experts)
        y = self._apply_routed_experts(x, weights, experts, has_drops=has_drops)
        if self.shared_expert is None:
            return y
        shared = self._apply_shared_expert(x)
        if self.coefficient is None:
            return y + shared
        routed_weight, shared_weight = self.coefficient(x).chunk(2, dim=-1)  # 2 x [s, b, 1]
        return y * routed_weight + shared * shared_weight

    def _apply_shared_expert(self, x: torch.Tensor) -> torch.Tensor:
        assert self.shared_expert is not None  # checked by forward
        y: torch.Tensor = self.shared_expert(x)
        return y if self.shared_expert_gate is None else y * self.shared_expert_gate(x)

    def _apply_routed_experts(
        self, x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor, *, has_drops: bool
    ) -> torch.Tensor:
        expert_parallel = self.parallel.for_experts
        x, weights = (
            enter_tensor_region(x, **expert_parallel.layer_kwargs),
            enter_tensor_region(weights, **expert_parallel.layer_kwargs),
        )
        experts = (
            gather_from_sequence_region(experts, expert_parallel.group)
            if expert_parallel.sequence_parallel
            else experts
        )
        slots = Slots.from_experts(experts.flatten(0, 1), self.model_args.num_experts, has_dropped=has_drops)
        if expert_parallel.expert.size > 1:
            exchange = Exchange.from_counts(slots.counts, expert_parallel.expert)
            rows = dispatch_rows(x.flatten(0, 1), slots, sum(exchange.send_counts))  # [m, h]
            outputs = exchange.combine(self.experts(exchange.dispatch(rows), exchange.counts, exchange.row_counts))
        else:
            rows = dispatch_rows(x.flatten(0, 1), slots)  # [m, h]
            outputs = self.experts(rows, slots.counts)
        choice_outputs = combine_rows(outputs, slots)  # [s b, k, h]
        y = (choice_outputs * weights.flatten(0, 1).unsqueeze(-1).to(choice_outputs.dtype)).sum(1).view_as(x)
        return leave_tensor_region(y, **expert_parallel.layer_kwargs)


class Experts(nn.Module):
    """Dense feed-forward layers, named by expert index, whose products are computed together.

    The class is not a ``ModuleDict``, because ZeRO 3 would treat each element as a layer and gather its weights when it
    is called. Experts are not called individually.

    Shapes:
        rows   [m, h], sorted by expert; ``counts`` [E] rows per expert, ``row_counts`` the same on the host if known
        output [m, h]

    Attributes:
        delay_wgrad: backward defers the weight gradients to ``backward_dw``. Set by schedules that split backward
            passes (``tds.engine.weight_grad_store``).
    """

    delay_wgrad = False

    def __init__(self, experts: Mapping[int, nn.Module]) -> None:
        super().__init__()
        self._delayed_grads: list[DeferredGrad] = []
        for idx, expert in experts.items():
            self.add_module(str(idx), expert)

    def forward(self, rows: torch.Tensor, counts: torch.Tensor, row_counts: list[int] | None = None) -> torch.Tensor:
        experts: list[Any] = list(self.children())
        up, down = [expert.up.weight for expert in experts], [expert.down.weight for expert in experts]
        ends = None
        if select_implementation(rows, down[0].shape[1]) == GROUPED:
            ends = ends_of(counts)
        elif row_counts is None:
            row_counts = counts.tolist()  # once for both products
        delayed_grads = self._delayed_grads if self.delay_wgrad else None
        hidden = grouped_linear(rows, up, counts, delayed_grads, row_counts, ends)  # [m, f/t], or [m, 2f/t] if gated
        if experts[0].up.bias is not None:
            hidden = add_grouped_bias(hidden, [expert.up.bias for expert in experts], counts, row_counts)
        if experts[0].is_gated:
            hidden = experts[0].gate(*gated_activation.split(hidden), experts[0].uses_gate_kernel(hidden))
        else:
            hidden = experts[0].activation(hidden)
        outputs = grouped_linear(hidden, down, counts, delayed_grads, row_counts, ends)  # [m, h]
        if experts[0].down.bias is None:
            return outputs
        is_added = float(experts[0].down.group.rank == 0)  # zeros on other ranks, whose gradients are then zeros
        return add_grouped_bias(outputs, [expert.down.bias * is_added for expert in experts], counts, row_counts)

    def stack_weights(self) -> None:
        """Move the weights of all experts into one storage per projection if products on their device are grouped.

        Must be called after the weights have their final dtype and device. Weights in fp32 are not moved, because main
        params may be views of them; nor are weights without memory, which ZeRO 3 gathers.
        """
        for name in ("up", "down"):
            weights = [getattr(expert, name).weight for expert in self.children()]
            can_move = all(weight.dtype not in WIDE_DTYPES and weight.is_contiguous() for weight in weights)
            if can_move and is_grouped(weights[0], *reversed(weights[0].shape)):
                share_storage(weights)

    def backward_dw(self) -> None:
        """Accumulate the deferred weight gradients of the oldest pending backward into ``grad``."""
        for accumulate_grad in self._delayed_grads[:2]:  # down and up
            accumulate_grad()
        del self._delayed_grads[:2]


def stack_expert_weights(module: nn.Module) -> None:
    """Call ``Experts.stack_weights`` on all layers of ``module``."""
    for layer in module.modules():
        if isinstance(layer, Experts):
            layer.stack_weights()


class Gate(nn.Module):
    """Gate of the shared expert, the sigmoid of a linear layer: [s, b, h] to [s, b, 1]."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.weight = empty_weight((1, hidden_size), Shard((1, hidden_size)))
        set_matrices(self.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return linear(x, self.weight, fuse=False).sigmoid()


class Coefficient(nn.Module):
    """Weights of the routed experts and of the shared expert, the softmax of a linear layer: [s, b, h] to [s, b, 2].

    The layer has a bias even without ``--hidden-bias``.

    Source: Rajbhandari et al. 2022, "DeepSpeed-MoE", section 4.1; DeepSpeed, moe/layer.py, ``use_residual``.
    """

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.weight = empty_weight((2, hidden_size), Shard((2, hidden_size)))
        self.bias = nn.Parameter(torch.zeros(2))
        set_matrices(self.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return linear(x, self.weight, self.bias, fuse=False).softmax(-1)
