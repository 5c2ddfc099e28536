"""Router: which experts a token goes through, with which weights; the losses and the bias that balance them."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from megatron.config.experts import SIGMOID
from megatron.models.common.model_args import ModelArgs
from megatron.models.common.parallel_context import ParallelContext
from megatron.models.common.parameters import named_modules
from megatron.mpu.context_parallel import gather_rows
from megatron.mpu.groups import Grid
from megatron.mpu.mappings import gather_from_sequence_region
from megatron.mpu.matrices import set_matrices
from megatron.mpu.shard import Shard, empty_weight
from megatron.ops.grouped import count
from tds.backward_state import is_running
from tds.linear_function import linear

# What a router computes, in fp32 (fp64 in fp64), of the logits z of E experts:
#
# | | softmax | softmax, --moe-router-pre-softmax | sigmoid |
# |---|---|---|---|
# | score of an expert | z | z | sigmoid(z), plus its bias |
# | weight of the k of highest score | softmax among the k | softmax among all | sigmoid(z) over its sum over the k |
# | probability p in the losses | softmax among all | the same | sigmoid(z) over its sum over all |
#
# Weights are multiplied by --moe-router-topk-scaling-factor. Of equal scores the lower expert number goes first.
#
# The losses are sums over the tokens of a global batch, so that no micro-batch, replica, stage or cut of the sequence
# changes them, divided as the cross entropy is by the tokens W that count there:
#
# | loss | is |
# |---|---|
# | load balancing | coefficient x E / W x sum over tokens and experts of f p |
# | z | coefficient / W x sum over tokens of logsumexp(z)^2 |
#
# f is the share of an expert in all choices of the global batch *before*: that of the one at work is not known when a
# pipeline's first backward runs. In the first step it is 1 / E. All tokens count here, padding and those that the loss
# mask leaves out too; Megatron's --calculate-per-token-loss divides in the same way. With --loss-average micro-batch W
# is the number of all tokens of the step, and a loss the mean over them. The choices are those of the
# router, ahead of what a capacity drops. Evaluation and recompute count nothing.
#
# Source: Shazeer et al. 2017 (top-k); Fedus et al. 2021, "Switch transformers", section 2.2 (load balancing); Zoph et
# al. 2022, "ST-MoE", section 3 (z-loss); DeepSeek-AI 2024, "DeepSeek-V3", section 2.1.2 (sigmoid, bias, groups); Qiu et
# al. 2025, "Demons in the detail" (shares of the global batch).


class Router(nn.Module):
    """Chooses k of E experts for each token.

    Shapes:
        input   [s, b, h], or this rank's part of it, by ``place``
        outputs 2 x [s, b, k]: weights, in fp32 at least, and expert numbers

    Attributes:
        gradient_scale: what the loss of a token is multiplied by ahead of backward; whoever trains sets it.
        tokens_per_expert: choices of the global batch before, int64 [E]; zeros: there was none.
        expert_bias: [E], in fp32, or None; it is no trained weight.
        counts, dropped, sums: of the micro-batches since ``clear``: choices [E], how many of these a capacity dropped,
            [1], and the two losses of all tokens, [2].
    """

    tokens_per_expert: torch.Tensor
    counts: torch.Tensor
    dropped: torch.Tensor
    sums: torch.Tensor

    def __init__(self, sizes: ModelArgs, place: ParallelContext) -> None:
        super().__init__()
        self.sizes, self.place = sizes, place
        number = sizes.num_experts
        self.weight = empty_weight((number, sizes.hidden_size), Shard((number, sizes.hidden_size)))
        set_matrices(self.weight)
        self.expert_bias: nn.Parameter | None = None
        if sizes.moe_router_enable_expert_bias:
            self.expert_bias = nn.Parameter(torch.zeros(number, dtype=torch.float32), requires_grad=False)
        self.register_buffer("tokens_per_expert", torch.zeros(number, dtype=torch.int64))
        self.register_buffer("counts", torch.zeros(number, dtype=torch.int64), persistent=False)
        self.register_buffer("dropped", torch.zeros(1, dtype=torch.int64), persistent=False)
        self.sums = torch.zeros(2, dtype=torch.float64)  # no buffer, which a model in 16 bits would round
        self.gradient_scale = 1.0
        place.on_part(self)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        wide = torch.promote_types(x.dtype, torch.float32)
        logits = linear(x.to(wide), self.weight.to(wide), fuse=False)  # [s, b, E]
        is_sigmoid = self.sizes.moe_router_score_function == SIGMOID
        scores = logits.sigmoid() if is_sigmoid else logits
        with torch.no_grad():
            experts = self._chosen(scores if self.expert_bias is None else scores + self.expert_bias)  # [s, b, k]
        if is_sigmoid:
            weights = scores.gather(-1, experts)
            if self.sizes.moe_router_topk > 1:
                weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        elif self.sizes.moe_router_pre_softmax:
            weights = logits.softmax(-1).gather(-1, experts)
        else:
            weights = logits.gather(-1, experts).softmax(-1)
        weights = weights * self.sizes.moe_router_topk_scaling_factor
        return self._balanced(weights, logits, scores if is_sigmoid else None, experts), experts

    def _chosen(self, scores: torch.Tensor) -> torch.Tensor:
        k, groups = self.sizes.moe_router_topk, self.sizes.moe_router_num_groups
        if groups:
            grouped = scores.unflatten(-1, (groups, -1))  # [s, b, groups, E/groups]
            best = grouped.sort(dim=-1, descending=True).values[..., : k // self.sizes.moe_router_group_topk].sum(-1)
            kept = first_of(best, self.sizes.moe_router_group_topk)
            is_kept = torch.zeros_like(best, dtype=torch.bool).scatter_(-1, kept, True)
            scores = grouped.masked_fill(~is_kept.unsqueeze(-1), float("-inf")).flatten(-2)
        return first_of(scores, k)

    def _balanced(
        self, weights: torch.Tensor, logits: torch.Tensor, scores: torch.Tensor | None, experts: torch.Tensor
    ) -> torch.Tensor:
        """Return ``weights``, through which backward adds the gradients of the losses; count while training."""
        sizes = self.sizes
        if not self.training:
            return weights
        losses = []
        if sizes.has_aux_loss:
            shares = logits.softmax(-1) if scores is None else scores / (scores.sum(-1, keepdim=True) + 1e-20)
            by_expert = shares.flatten(0, -2).sum(0)  # [E]
            losses.append(sizes.moe_aux_loss_coeff * sizes.num_experts * (by_expert * self._fractions(logits)).sum())
        if sizes.moe_z_loss_coeff:
            losses.append(sizes.moe_z_loss_coeff * logits.logsumexp(-1).square().sum())
        if not is_running():  # a recompute sees the same tokens again
            self.counts += count(experts, sizes.num_experts)
            if losses:
                given = [loss.detach().double() for loss in losses]
                found = torch.stack(given if len(given) == 2 else self._placed(given[0]))
                self.sums = self.sums.to(found.device) + found
        return _WithLoss.apply(weights, sum(losses), self) if losses and torch.is_grad_enabled() else weights

    def _placed(self, loss: torch.Tensor) -> list[torch.Tensor]:
        zero = torch.zeros_like(loss)
        return [loss, zero] if self.sizes.has_aux_loss else [zero, loss]

    def _fractions(self, like: torch.Tensor) -> torch.Tensor:
        """Return f: the share of each expert in the choices of the global batch before."""
        before = self.tokens_per_expert.to(like.dtype)
        return torch.where(before.sum() > 0, before / before.sum().clamp(min=1), 1.0 / len(before))

    @torch.no_grad()
    def count_dropped(self, kept: torch.Tensor) -> None:
        """Count the choices that are not ``kept``, where those of ``forward`` are counted."""
        if self.training and not is_running():
            self.dropped += kept.logical_not().sum()

    def clear(self) -> None:
        """Forget what micro-batches counted."""
        self.counts.zero_()
        self.dropped.zero_()
        self.sums.zero_()

    @torch.no_grad()
    def take(self, counts: torch.Tensor) -> None:
        """Let ``counts`` [E] be the choices of the global batch that has been trained on, and move the bias by them."""
        self.tokens_per_expert.copy_(counts)
        if self.expert_bias is not None:
            below = torch.sign(counts.sum() / len(counts) - counts)
            self.expert_bias.add_(below.to(self.expert_bias.dtype), alpha=self.sizes.moe_router_bias_update_rate)


class _WithLoss(torch.autograd.Function):
    """``weights`` as they are; in backward ``loss`` has the gradient that the loss of a token has."""

    @staticmethod
    def forward(ctx: Any, weights: torch.Tensor, loss: torch.Tensor, router: Router) -> torch.Tensor:
        ctx.router, ctx.like = router, loss.new_empty(0)
        return weights.view_as(weights)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return grads[0], ctx.like.new_full((), ctx.router.gradient_scale), None


def first_of(scores: torch.Tensor, number: int) -> torch.Tensor:
    """Return where the highest ``number`` of the last dimension are, of equal ones the first; topk leaves that open."""
    return scores.sort(dim=-1, descending=True, stable=True).indices[..., :number].contiguous()  # not a view of all


# Which choices an expert of limited capacity drops: by the whole sample, so that no layout changes it.


@torch.no_grad()
def within_capacity(
    experts: torch.Tensor, weights: torch.Tensor, sizes: ModelArgs, place: ParallelContext
) -> torch.Tensor:
    """Return which choices are kept, [s, b, k]: of each sample and expert the first ``ceil(factor s k / E)``.

    The first by weight, of equal ones by position; or by position. Collective where ranks have parts of a sequence.

    Shapes:
        experts, weights [s, b, k], or this rank's part of them
    """
    number, own = sizes.num_experts, len(experts)
    table = torch.full((*experts.shape[:2], number), -1.0, dtype=weights.dtype, device=weights.device)
    table.scatter_(-1, experts, weights)  # [s, b, E], below 0 where it was not chosen
    whole = gather_from_sequence_region(table, place.group) if place.sequence_parallel else table
    rows = len(whole)
    whole = gather_rows(whole, place.context)
    places = -(-sizes.moe_expert_capacity_factor * len(whole) * sizes.moe_router_topk // number)
    chosen = whole >= 0
    if sizes.moe_token_drop_policy == "position":
        rank = chosen.long().cumsum(0) - 1
    else:
        order = whole.sort(dim=0, descending=True, stable=True).indices
        rank = torch.empty_like(order).scatter_(0, order, _numbers(order))
    kept = chosen & (rank < places)
    kept = kept[place.positions(rows, kept.device)] if place.context.size > 1 else kept
    kept = kept[place.group.rank * own : (place.group.rank + 1) * own] if place.sequence_parallel else kept
    return kept.gather(-1, experts)


def _numbers(like: torch.Tensor) -> torch.Tensor:
    return torch.arange(len(like), device=like.device).view(-1, 1, 1).expand_as(like)


# The routers of a rank between steps.


@dataclass(frozen=True)
class ExpertLoad:
    """What the routers of all layers have chosen in a global batch: the same numbers on every rank, in every layout.

    Attributes:
        layers: names of the layers with experts, such as "layers.2", in their order.
        tokens: int64 [layers, E]: choices of each expert, those that a capacity drops among them.
        dropped: int64 [layers]: choices that a capacity has dropped.
    """

    layers: tuple[str, ...]
    tokens: torch.Tensor
    dropped: torch.Tensor

    def imbalance(self) -> list[float]:
        """Return by layer the most choices that an expert has over their mean: 1 is even, E / k as uneven as can be."""
        tokens = self.tokens.double()
        found: list[float] = (tokens.amax(1) / tokens.mean(1)).tolist()
        return found

    def entropy(self) -> list[float]:
        """Return by layer the entropy of the experts' shares over ln E: 1 is even, ln k / ln E as uneven as can be."""
        tokens = self.tokens.double()
        entropy = torch.special.entr(tokens / tokens.sum(1, keepdim=True)).sum(1) / math.log(tokens.shape[1])
        found: list[float] = entropy.tolist()
        return found

    def dropped_share(self) -> list[float]:
        """Return by layer the share of choices that a capacity has dropped."""
        found: list[float] = (self.dropped.double() / self.tokens.sum(1)).tolist()
        return found


class Routers:
    """The routers of this rank's part of a model: what they count in a step becomes that of the global batch.

    Made on every rank together: each learns which layers of the others have experts. Collective.

    Args:
        sequence_parallel: tensor ranks see different tokens.

    Attributes:
        layers: as those of ``ExpertLoad``.
    """

    def __init__(self, module: nn.Module, grid: Grid, *, sequence_parallel: bool = False) -> None:
        named = named_routers(named_modules(module))
        self._routers = list(named.values())
        self._grid = grid
        self._groups = [grid.data_context, *([grid.tensor] if sequence_parallel else [])]
        self._scale = 1.0
        every = grid.host.gather_objects({name: each.sizes.num_experts for name, each in named.items()})
        experts = {name: number for found in every for name, number in found.items()}
        names = sorted(experts, key=_by_number)
        self.layers = _layers_of(names)
        self._rows = [names.index(name) for name in named]
        self._num_experts = max(experts.values(), default=0)

    def set_scale(self, scale: float) -> None:
        """Let backward multiply the losses of tokens by ``scale``, as the loss of a token is, from now on."""
        self._scale = scale
        for router in self._routers:
            router.gradient_scale = scale

    @torch.no_grad()
    def end_step(self, factor: float, device: torch.device, *, is_taken: bool) -> tuple[dict[str, float], ExpertLoad]:
        """Return the losses of the global batch by name, each the sum over layers, and what was chosen. Collective.

        Args:
            factor: what the step has multiplied gradients by, so that those of the loss are those of its mean.
            is_taken: weights have moved; else the batch counts for nothing.
        """
        experts = self._num_experts
        table = torch.zeros(len(self.layers), experts + 3, dtype=torch.float64, device=device)  # counts are exact
        own = [torch.cat([each.counts, each.dropped, each.sums.to(device)]) for each in self._routers]  # in fp64
        for row, router, counted in zip(self._rows, self._routers, self._summed(own), strict=True):
            table[row] = counted
            if is_taken:
                router.take(counted[:experts].long())
            router.clear()
        if self._grid.pipe.size > 1:  # a row is that of one stage, and zeros on the others
            dist.all_reduce(table, group=self._grid.pipe.handle)
        table = table.cpu()
        aux, z = (table[:, -2:].sum(0) * (self._scale * factor)).tolist()
        counts = table[:, :-2].long()
        load = ExpertLoad(self.layers, counts[:, :experts], counts[:, experts])
        return {"moe_aux_loss": aux, "moe_z_loss": z}, load

    def _summed(self, found: list[torch.Tensor]) -> list[torch.Tensor]:
        if not found:
            return []
        together = torch.stack(found)
        for group in self._groups:
            if group.size > 1:
                dist.all_reduce(together, group=group.handle)
        return list(together)


def named_routers(modules: Iterable[tuple[str, nn.Module]]) -> dict[str, Router]:
    """Return the routers of ``modules``, by the names that they have there."""
    return {name: module for name, module in modules if isinstance(module, Router)}


def _layers_of(names: Sequence[str]) -> tuple[str, ...]:
    """Return the names of routers up to the numbers of their layers; whole where these are not of one router each."""
    found = [layer.group() if (layer := re.match(r"(?:.*?\.)??\d+(?=\.)", name)) else name for name in names]
    return tuple(found if len(set(found)) == len(found) else names)


def _by_number(name: str) -> list[str]:
    return [part.zfill(9) if part.isdigit() else part for part in name.split(".")]
