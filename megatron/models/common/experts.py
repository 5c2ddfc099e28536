"""MoE: mixture-of-experts feed-forward layer with routed and shared experts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from megatron.models.common.model_args import ModelArgs
from megatron.models.common.parallel_context import ParallelContext
from megatron.models.common.router import Router, within_capacity
from megatron.mpu.expert_parallel import Exchange, set_expert
from megatron.mpu.mappings import enter_tensor_region, gather_from_sequence_region, leave_tensor_region
from megatron.mpu.matrices import set_matrices
from megatron.mpu.shard import Shard, empty_weight, set_partial, set_shard
from megatron.ops.grouped import Delayed, Slots, grouped_linear, return_rows, send_rows
from tds.linear_function import linear

# Each expert has separate weights, named by its index: ``experts.5.up.weight`` [2f/t, h] and
# ``experts.5.down.weight`` [h, f/t], as in the grouped layers of Megatron's Transformer Engine. Code that handles
# weights by name and shard (checkpoints, ZeRO, Muon, norms, Hugging Face folders) therefore needs no rule for experts.


class MoE(nn.Module):
    """Mixture of experts: ``sum over the chosen experts e of weight_e(x) e(x)``, plus the shared expert of x.

    Shapes:
        input, output [s, b, h], or this rank's shard of the sequence, depending on ``place``

    Args:
        make: builds a dense feed-forward layer from (sizes, place); called for each expert and the shared expert.

    Source: Shazeer et al. 2017, "Outrageously large neural networks"; Dai et al. 2024, "DeepSeekMoE" (shared experts);
    Gale et al. 2022, "MegaBlocks" (no token dropped).
    """

    def __init__(
        self, sizes: ModelArgs, place: ParallelContext, make: Callable[[ModelArgs, ParallelContext], Any]
    ) -> None:
        super().__init__()
        self.sizes, self.place = sizes, place
        self.router = Router(sizes, place)
        expert_args = replace(sizes, ff_hidden_size=sizes.moe_ffn_hidden_size)
        num_local = sizes.num_experts // place.expert.size
        indices = range(place.expert.rank * num_local, (place.expert.rank + 1) * num_local)
        self.experts = Experts({idx: make(expert_args, place.of_experts) for idx in indices})
        for parameter in self.experts.parameters():
            if place.expert.size > 1:
                set_expert(parameter)
            if not place.cuts_experts:
                set_shard(parameter, Shard(tuple(parameter.shape)))  # not sharded: each tensor rank has a full copy
            if place.sequence_parallel and not place.cuts_experts:
                set_partial(parameter)
        self.shared_expert, self.shared_expert_gate = None, None
        if sizes.moe_shared_expert_intermediate_size:
            self.shared_expert = make(replace(sizes, ff_hidden_size=sizes.moe_shared_expert_intermediate_size), place)
        if sizes.moe_shared_expert_gate:
            self.shared_expert_gate = place.on_part(Gate(sizes.hidden_size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, experts = self.router(x)  # 2 x [s, b, k]
        drops = self.sizes.moe_expert_capacity_factor > 0
        if drops:
            is_kept = within_capacity(experts, weights, self.sizes, self.place)
            self.router.count_dropped(is_kept)
            experts = experts.masked_fill(~is_kept, self.sizes.num_experts)
        y = self._routed(x, weights, experts, drops=drops)
        return y if self.shared_expert is None else y + self._shared(x)

    def _shared(self, x: torch.Tensor) -> torch.Tensor:
        assert self.shared_expert is not None  # checked by forward
        y: torch.Tensor = self.shared_expert(x)
        return y if self.shared_expert_gate is None else y * self.shared_expert_gate(x)

    def _routed(self, x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor, *, drops: bool) -> torch.Tensor:
        parallel = self.place.of_experts
        x, weights = enter_tensor_region(x, **parallel.cut), enter_tensor_region(weights, **parallel.cut)
        experts = gather_from_sequence_region(experts, parallel.group) if parallel.sequence_parallel else experts
        slots = Slots.of(experts.flatten(0, 1), self.sizes.num_experts, drops=drops)
        rows = send_rows(x.flatten(0, 1), slots)  # [m, h]
        if parallel.expert.size > 1:
            exchange = Exchange.of(slots.counts, parallel.expert)
            outputs = exchange.give_back(self.experts(exchange.send(rows), exchange.counts))
        else:
            outputs = self.experts(rows, slots.counts)
        by_choice = return_rows(outputs, slots)  # [s b, k, h]
        y = (by_choice * weights.flatten(0, 1).unsqueeze(-1).to(by_choice.dtype)).sum(1).view_as(x)
        return leave_tensor_region(y, **parallel.cut)


class Experts(nn.Module):
    """Dense feed-forward layers, named by expert index, whose products are computed together.

    The class is not a ``ModuleDict``, because ZeRO 3 would treat each element as a layer and gather its weights when it
    is called. Experts are not called individually.

    Shapes:
        rows   [m, h], sorted by expert; ``counts`` [E] rows per expert
        output [m, h]

    Attributes:
        delay_wgrad: backward defers the weight gradients to ``backward_dw``. Set by schedules that split backward
            passes (``tds.engine.weight_grad_store``).
    """

    delay_wgrad = False

    def __init__(self, experts: Mapping[int, nn.Module]) -> None:
        super().__init__()
        self._delayed: list[Delayed] = []
        for idx, expert in experts.items():
            self.add_module(str(idx), expert)

    def forward(self, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        experts: list[Any] = list(self.children())
        delayed = self._delayed if self.delay_wgrad else None
        # [m, f/t], or [m, 2f/t] with a gated activation
        hidden = grouped_linear(rows, [expert.up.weight for expert in experts], counts, delayed)
        activation = experts[0].activation
        if experts[0].is_gated:
            gate, value = hidden.unflatten(-1, (-1, 2)).unbind(-1)
            hidden = activation(gate) * value
        else:
            hidden = activation(hidden)
        return grouped_linear(hidden, [expert.down.weight for expert in experts], counts, delayed)

    def backward_dw(self) -> None:
        """Accumulate the deferred weight gradients of the oldest pending backward into ``grad``."""
        for add in self._delayed[:2]:  # down and up
            add()
        del self._delayed[:2]


class Gate(nn.Module):
    """Gate of the shared expert, the sigmoid of a linear layer: [s, b, h] to [s, b, 1]."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.weight = empty_weight((1, hidden_size), Shard((1, hidden_size)))
        set_matrices(self.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return linear(x, self.weight, fuse=False).sigmoid()
