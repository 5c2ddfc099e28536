"""MoE: the feed-forward half of a layer as experts, of which each token goes through a few, beside a shared one."""

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

# Each expert has its own weights, under its own number: ``experts.5.up.weight`` [2f/t, h] and ``experts.5.down.weight``
# [h, f/t], as the grouped layers of Megatron's Transformer Engine have them. So all that knows weights by their names
# and their cut (checkpoints, ZeRO, Muon, norms, Hugging Face folders) knows experts without a rule of its own.


class MoE(nn.Module):
    """``sum over the chosen experts e of weight_e(x) e(x)``, plus the shared expert of x.

    Shapes:
        input, output [s, b, h], or this rank's part of it, by ``place``

    Args:
        make: makes a dense feed-forward half, of which an expert has the weights.

    Source: Shazeer et al. 2017, "Outrageously large neural networks"; Dai et al. 2024, "DeepSeekMoE" (shared experts);
    Gale et al. 2022, "MegaBlocks" (no token dropped).
    """

    def __init__(
        self, sizes: ModelArgs, place: ParallelContext, make: Callable[[ModelArgs, ParallelContext], Any]
    ) -> None:
        super().__init__()
        self.sizes, self.place = sizes, place
        self.router = Router(sizes, place)
        each = replace(sizes, ff_hidden_size=sizes.moe_ffn_hidden_size)
        own = sizes.num_experts // place.expert.size
        numbers = range(place.expert.rank * own, (place.expert.rank + 1) * own)
        self.experts = Experts({number: make(each, place.of_experts) for number in numbers})
        for parameter in self.experts.parameters():
            if place.expert.size > 1:
                set_expert(parameter)
            if not place.cuts_experts:
                set_shard(parameter, Shard(tuple(parameter.shape)))  # whole on each, and counted once
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
            kept = within_capacity(experts, weights, self.sizes, self.place)
            self.router.count_dropped(kept)
            experts = experts.masked_fill(~kept, self.sizes.num_experts)
        y = self._routed(x, weights, experts, drops=drops)
        return y if self.shared_expert is None else y + self._shared(x)

    def _shared(self, x: torch.Tensor) -> torch.Tensor:
        assert self.shared_expert is not None  # asked by forward
        y: torch.Tensor = self.shared_expert(x)
        return y if self.shared_expert_gate is None else y * self.shared_expert_gate(x)

    def _routed(self, x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor, *, drops: bool) -> torch.Tensor:
        place = self.place.of_experts
        x, weights = enter_tensor_region(x, **place.cut), enter_tensor_region(weights, **place.cut)
        experts = gather_from_sequence_region(experts, place.group) if place.sequence_parallel else experts
        slots = Slots.of(experts.flatten(0, 1), self.sizes.num_experts, drops=drops)
        rows = send_rows(x.flatten(0, 1), slots)  # [m, h]
        if place.expert.size > 1:
            exchange = Exchange.of(slots.counts, place.expert)
            made = exchange.give_back(self.experts(exchange.send(rows), exchange.counts))
        else:
            made = self.experts(rows, slots.counts)
        each = return_rows(made, slots)  # [s b, k, h]
        y = (each * weights.flatten(0, 1).unsqueeze(-1).to(each.dtype)).sum(1).view_as(x)
        return leave_tensor_region(y, **place.cut)


class Experts(nn.Module):
    """Dense feed-forward halves under their numbers, whose products are made together.

    It is no ``ModuleDict``: ZeRO 3 takes the elements of lists for layers, and gathers each where it is called.

    Shapes:
        rows   [m, h], those of the first expert first, ``counts`` [E] of each
        output [m, h]

    Attributes:
        delay_wgrad: the backward of a forward within leaves the gradients of the weights to ``backward_dw``, as a
            schedule that splits backwards asks for (``tds.engine.weight_grad_store``).
    """

    delay_wgrad = False

    def __init__(self, experts: Mapping[int, nn.Module]) -> None:
        super().__init__()
        self._delayed: list[Delayed] = []
        for number, expert in experts.items():
            self.add_module(str(number), expert)

    def forward(self, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        own: list[Any] = list(self.children())
        delayed = self._delayed if self.delay_wgrad else None
        hidden = grouped_linear(rows, [each.up.weight for each in own], counts, delayed)  # [m, f/t], gated [m, 2f/t]
        activation = own[0].activation
        if own[0].is_gated:
            gate, value = hidden.unflatten(-1, (-1, 2)).unbind(-1)
            hidden = activation(gate) * value
        else:
            hidden = activation(hidden)
        return grouped_linear(hidden, [each.down.weight for each in own], counts, delayed)

    def backward_dw(self) -> None:
        """Add the gradients of the weights of the oldest backward that waits to their ``grad``."""
        for add in self._delayed[:2]:  # down and up
            add()
        del self._delayed[:2]


class Gate(nn.Module):
    """The sigmoid of a product: [s, b, h] to [s, b, 1]."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.weight = empty_weight((1, hidden_size), Shard((1, hidden_size)))
        set_matrices(self.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return linear(x, self.weight, fuse=False).sigmoid()
