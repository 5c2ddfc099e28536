"""Router: chooses the experts of each token, and balances them with auxiliary losses and a bias."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from megatron.config.experts import AUX_LOSS, AUX_LOSSES, GLOBAL_AUX_LOSS, SEQ_AUX_LOSS, SIGMOID
from megatron.models.common.model_args import ModelArgs
from megatron.models.common.parallel_context import ParallelContext
from megatron.models.common.parameters import named_modules
from megatron.mpu.context_parallel import gather_rows
from megatron.mpu.groups import SINGLE, Grid, Group
from megatron.mpu.mappings import gather_from_sequence_region
from megatron.mpu.matrices import set_matrices
from megatron.mpu.random_key import hash_key
from megatron.mpu.shard import Shard, empty_weight
from megatron.ops.grouped import count_rows
from tds.backward_state import is_running
from tds.linear_function import linear

# Scores, weights and probabilities computed from the logits z of E experts, in fp32 (fp64 for fp64 inputs):
#
# | | softmax | softmax, --moe-router-pre-softmax | sigmoid |
# |---|---|---|---|
# | score of an expert | z | z | sigmoid(z), plus its bias |
# | weights of the top k | softmax over the k | softmax over all | sigmoid(z) divided by its sum over the k |
# | probability p in the losses | softmax over all | softmax over all | sigmoid(z) divided by its sum over all |
#
# With sinkhorn, the score in training is exp(z) balanced over the micro-batch (``sinkhorn``), and otherwise the weight;
# weights are the softmax over all experts, or sigmoid(z) for k = 1.
#
# Weights are multiplied by --moe-router-topk-scaling-factor. In a tie, the lower expert index wins.
#
# The auxiliary losses are sums over the tokens of a global batch, so that they do not depend on micro-batches,
# replicas, stages or sequence shards. Like the cross entropy, they are divided by the number W of unmasked tokens:
#
# | loss | value |
# |---|---|
# | load balancing | coefficient x E / W x sum over tokens and experts of f p |
# | z | coefficient / W x sum over tokens of logsumexp(z)^2 |
#
# f is an expert's share of choices. --moe-router-load-balancing-type selects the tokens whose choices are counted; with
# several types, the losses are added, each with its coefficient:
#
# | type | f of a token |
# |---|---|
# | aux_loss | of the *previous* global batch; in the first step 1 / E |
# | seq_aux_loss | of the token's sequence |
# | global_aux_loss | of the micro-batches of this step up to the token's, on all replicas |
#
# The share in the current global batch is not known when the first backward of a pipeline runs. aux_loss counts the
# chosen experts. The other two types count the k most probable experts, without bias and groups, as Megatron does.
# global_aux_loss depends on the samples of a micro-batch on all replicas, and sinkhorn on those on one replica; the
# other types depend on no layout.
#
# The sums include all tokens, also padding and masked tokens; Megatron's --calculate-per-token-loss divides in the same
# way. With --loss-average micro-batch, W is the number of all tokens of the step, and each loss is the mean over them.
# Choices are counted before the capacity drops any. Nothing is counted during evaluation and recomputation.
#
# Source: Clark et al. 2022, "Unified scaling laws for routed language models", section 3.1 (sinkhorn); Megatron-LM,
# core/transformer/moe (types of load balancing); Shazeer et al. 2017 (top-k); Fedus et al. 2021, "Switch transformers",
# section 2.2 (load balancing); Zoph et al. 2022, "ST-MoE", section 3 (z-loss); DeepSeek-AI 2024, "DeepSeek-V3",
# section 2.1.2 (sigmoid, bias, groups, balance per sequence); Qiu et al. 2025, "Demons in the detail" (shares of the
# global batch).


NUM_LOSSES = len(AUX_LOSSES) + 1
"""Number of auxiliary losses: load balancing by type, and the z-loss."""
LOSS_NAMES = {AUX_LOSS: "load_balancing_loss", SEQ_AUX_LOSS: "seq_load_balancing_loss",
              GLOBAL_AUX_LOSS: "global_load_balancing_loss"}  # fmt: skip
"""Names of the load balancing losses in logs, as in Megatron-LM, if there are several."""


class Router(nn.Module):
    """Top-k router: chooses k of E experts for each token.

    Shapes:
        input   [s, b, h], or this rank's shard of the sequence, depending on ``parallel``
        outputs 2 x [s, b, k]: weights (at least fp32) and expert indices

    Attributes:
        gradient_scale: factor by which a token's loss is multiplied before backward; set by the training loop.
        tokens_per_expert: choices in the previous global batch, int64 [E]; zeros before the first one.
        bias: [E], added to the logits and trained, or None.
        expert_bias: [E] in fp32, or None; not a trained weight.
        counts: choices of each expert since the last ``clear``, int64 [E].
        dropped: choices dropped by the expert capacity since the last ``clear``, [1].
        replicas: data-parallel group, over which global_aux_loss counts choices; set by ``Routers``.
        step_counts: for global_aux_loss, choices of all replicas since the last ``clear``, [E].
        loss_sums: losses since the last ``clear``, each summed over tokens, fp64 [4]: one for each type of load
            balancing (``AUX_LOSSES``), and the z-loss.
    """

    tokens_per_expert: torch.Tensor
    counts: torch.Tensor
    dropped: torch.Tensor
    loss_sums: torch.Tensor

    def __init__(self, args: ModelArgs, parallel: ParallelContext) -> None:
        super().__init__()
        self.model_args, self.parallel = args, parallel
        num_experts = args.num_experts
        self.weight = empty_weight((num_experts, args.hidden_size), Shard((num_experts, args.hidden_size)))
        set_matrices(self.weight)
        self.bias = nn.Parameter(torch.zeros(num_experts)) if args.hidden_bias else None
        self.expert_bias: nn.Parameter | None = None
        if args.moe_router_enable_expert_bias:
            self.expert_bias = nn.Parameter(torch.zeros(num_experts, dtype=torch.float32), requires_grad=False)
        self.register_buffer("tokens_per_expert", torch.zeros(num_experts, dtype=torch.int64))
        self.register_buffer("counts", torch.zeros(num_experts, dtype=torch.int64), persistent=False)
        self.register_buffer("dropped", torch.zeros(1, dtype=torch.int64), persistent=False)
        self.loss_sums = torch.zeros(NUM_LOSSES, dtype=torch.float64)  # not a buffer: a 16-bit model would round it
        self.gradient_scale = 1.0
        self.replicas: Group = SINGLE
        self.step_counts = torch.zeros(num_experts, dtype=torch.float64)
        self._shares_by_micro_batch: dict[int, torch.Tensor] = {}  # for the recomputation of a micro-batch
        parallel.mark_sequence_parallel(self)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        dtype = torch.promote_types(x.dtype, torch.float32)
        bias = None if self.bias is None else self.bias.to(dtype)
        logits = linear(x.to(dtype), self.weight.to(dtype), bias, fuse=False)  # [s, b, E]
        if self.model_args.has_sinkhorn:
            return self._route_by_sinkhorn(logits)
        is_sigmoid = self.model_args.moe_router_score_function == SIGMOID
        scores = logits.sigmoid() if is_sigmoid else logits
        with torch.no_grad():
            choice_scores = scores if is_sigmoid or self.expert_bias is None else logits.softmax(-1)
            experts = self._choose_experts(
                choice_scores if self.expert_bias is None else choice_scores + self.expert_bias
            )  # [s, b, k]
        if is_sigmoid:
            weights = scores.gather(-1, experts)
            if self.model_args.moe_router_topk > 1:
                weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        elif self.model_args.moe_router_pre_softmax:
            weights = logits.softmax(-1).gather(-1, experts)
        else:
            weights = logits.gather(-1, experts).softmax(-1)
        weights = weights * self.model_args.moe_router_topk_scaling_factor
        return self._attach_aux_losses(weights, logits, scores if is_sigmoid else None, experts), experts

    def _route_by_sinkhorn(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Choose experts by scores that are balanced over the micro-batch; evaluation chooses by the weights.

        Collective in training if ranks have shards of a sequence.
        """
        topk = self.model_args.moe_router_topk
        scores = logits.sigmoid() if topk == 1 else logits.softmax(-1)
        with torch.no_grad():
            if self.training:
                all_logits = gather_tokens(logits, self.parallel)  # [s, b, E] with all tokens of the micro-batch
                balanced = sinkhorn(all_logits.flatten(0, 1)).view_as(all_logits)
                experts = top_indices(select_tokens(balanced, len(logits), self.parallel), topk)
            else:
                experts = top_indices(scores, topk)
        return self._attach_aux_losses(scores.gather(-1, experts), logits, None, experts), experts

    def _choose_experts(self, scores: torch.Tensor) -> torch.Tensor:
        topk, num_groups = self.model_args.moe_router_topk, self.model_args.moe_router_num_groups
        if num_groups:
            grouped_scores = scores.unflatten(-1, (num_groups, -1))  # [s, b, groups, E/groups]
            best_scores = grouped_scores.sort(dim=-1, descending=True).values[..., : self.model_args.num_group_scores]
            group_scores = best_scores.sum(-1)
            chosen_groups = top_indices(group_scores, self.model_args.moe_router_group_topk)
            is_chosen_group = torch.zeros_like(group_scores, dtype=torch.bool).scatter_(-1, chosen_groups, True)
            scores = grouped_scores.masked_fill(~is_chosen_group.unsqueeze(-1), float("-inf")).flatten(-2)
        return top_indices(scores, topk)

    def _attach_aux_losses(
        self, weights: torch.Tensor, logits: torch.Tensor, scores: torch.Tensor | None, experts: torch.Tensor
    ) -> torch.Tensor:
        """Attach the gradients of the auxiliary losses to ``weights`` and count the choices; only in training mode."""
        args = self.model_args
        if not self.training:
            return weights
        losses: dict[int, torch.Tensor] = {}  # by index in ``loss_sums``
        if args.has_aux_loss:
            probabilities = logits.softmax(-1) if scores is None else scores / (scores.sum(-1, keepdim=True) + 1e-20)
        for balancing_type, coefficient in args.aux_losses.items():
            shares = self._expert_shares(balancing_type, probabilities.detach())  # [E] or [b, E]
            expert_sums = probabilities.sum(0) if shares.dim() == 2 else probabilities.flatten(0, -2).sum(0)
            loss = coefficient * args.num_experts * (expert_sums * shares).sum()
            losses[AUX_LOSSES.index(balancing_type)] = loss
        if args.moe_z_loss_coeff:
            losses[len(AUX_LOSSES)] = args.moe_z_loss_coeff * logits.logsumexp(-1).square().sum()
        if not is_running():  # recomputation processes the same tokens again
            self.counts += count_rows(experts, args.num_experts)
            if losses:
                self.loss_sums = self.loss_sums.to(logits.device)  # copied in the first step only
                for idx, loss in losses.items():
                    self.loss_sums[idx] += loss.detach().double()
        has_gradient = losses and torch.is_grad_enabled()
        return _AttachLoss.apply(weights, sum(losses.values()), self) if has_gradient else weights

    @torch.no_grad()
    def _expert_shares(self, balancing_type: str, probabilities: torch.Tensor) -> torch.Tensor:
        """Return f, each expert's share of choices: [E], or [b, E] for every sequence.

        Collective for seq_aux_loss if ranks have shards of a sequence, and for global_aux_loss.

        Args:
            probabilities: p [s, b, E], or this rank's shard of it.
        """
        micro_batch = self.parallel.streams.position.micro_batch
        if balancing_type == AUX_LOSS:
            return self._previous_expert_shares(probabilities)
        if is_running() and balancing_type == GLOBAL_AUX_LOSS:
            return self._shares_by_micro_batch[micro_batch]
        is_chosen = torch.zeros_like(probabilities).scatter_(
            -1, top_indices(probabilities, self.model_args.moe_router_topk), 1.0
        )
        counts = is_chosen.sum(0)  # [b, E]
        groups = [self.parallel.context, *([self.parallel.group] if self.parallel.sequence_parallel else [])]
        if balancing_type == GLOBAL_AUX_LOSS:
            counts, groups = counts.sum(0), [*groups, self.replicas]
        for group in groups:
            if group.size > 1:
                dist.all_reduce(counts, group=group.handle)
        if balancing_type == GLOBAL_AUX_LOSS:
            self.step_counts = self.step_counts.to(counts.device) + counts
            counts = self.step_counts.to(counts.dtype)
            self._shares_by_micro_batch[micro_batch] = counts / counts.sum()
        return counts / counts.sum(-1, keepdim=True)

    def _previous_expert_shares(self, like: torch.Tensor) -> torch.Tensor:
        """Return f, the share of each expert in the choices of the previous global batch."""
        previous_counts = self.tokens_per_expert.to(like.dtype)
        return torch.where(
            previous_counts.sum() > 0, previous_counts / previous_counts.sum().clamp(min=1), 1.0 / len(previous_counts)
        )

    @torch.no_grad()
    def count_dropped(self, is_kept: torch.Tensor) -> None:
        """Count the choices that are False in ``is_kept`` [s, b, k], except during evaluation and recomputation."""
        if self.training and not is_running():
            self.dropped += is_kept.logical_not().sum()

    def clear(self) -> None:
        """Reset the counters of the micro-batches."""
        self.counts.zero_()
        self.dropped.zero_()
        self.loss_sums.zero_()
        self.step_counts.zero_()
        self._shares_by_micro_batch.clear()

    @torch.no_grad()
    def update_balance(self, counts: torch.Tensor) -> None:
        """Store ``counts`` [E], the choices of the global batch of this step, and update the expert bias."""
        self.tokens_per_expert.copy_(counts)
        if self.expert_bias is not None:
            direction = torch.sign(counts.sum() / len(counts) - counts)
            self.expert_bias.add_(
                direction.to(self.expert_bias.dtype), alpha=self.model_args.moe_router_bias_update_rate
            )


class _AttachLoss(torch.autograd.Function):
    """Identity function of ``weights`` whose backward also backpropagates ``loss``, scaled by ``gradient_scale``."""

    @staticmethod
    def forward(ctx: Any, weights: torch.Tensor, loss: torch.Tensor, router: Router) -> torch.Tensor:
        ctx.router, ctx.like = router, loss.new_empty(0)
        return weights.view_as(weights)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return grads[0], ctx.like.new_full((), ctx.router.gradient_scale), None


def top_indices(scores: torch.Tensor, k: int) -> torch.Tensor:
    """Return the indices of the ``k`` highest scores in the last dimension; ties go to the lower index.

    ``torch.topk`` does not define the order of ties.
    """
    # contiguous: a view would keep all indices in memory
    return scores.sort(dim=-1, descending=True, stable=True).indices[..., :k].contiguous()


@torch.no_grad()
def sinkhorn(logits: torch.Tensor, tolerance: float = 1e-4) -> torch.Tensor:
    """Scale the rows and columns of exp(``logits``) until all tokens, and all experts, have equal sums.

    The iteration ends once the column factors change by at most ``tolerance`` on average. The host waits for the device
    in each iteration. Rounding can keep large factors from settling, so the number of iterations is limited.

    Shapes:
        logits, output [tokens, E]
    """
    cost = logits.exp()
    num_tokens, num_experts = cost.shape
    column_factors = cost.new_ones(num_experts)
    for _ in range(_SINKHORN_MAX_ITERATIONS):
        row_factors = 1 / (num_tokens * ((cost * column_factors).sum(1) + _SINKHORN_EPS))
        previous = column_factors
        column_factors = 1 / (num_experts * ((cost * row_factors.unsqueeze(1)).sum(0) + _SINKHORN_EPS))
        if not (column_factors - previous).abs().mean().item() > tolerance:  # also ends at NaN
            break
    return cost * column_factors * row_factors.unsqueeze(1)


_SINKHORN_EPS, _SINKHORN_MAX_ITERATIONS = 1e-8, 1000


# The tokens of a micro-batch: [s, b, ...] on each rank of the tensor (with sequence parallelism) and context groups.


def gather_tokens(x: torch.Tensor, parallel: ParallelContext) -> torch.Tensor:
    """Gather the rows of full sequences, in sequence order, without autograd. Collective if ranks have shards."""
    x = gather_from_sequence_region(x, parallel.group) if parallel.sequence_parallel else x
    return gather_rows(x, parallel.context)


def select_tokens(x: torch.Tensor, num_rows: int, parallel: ParallelContext) -> torch.Tensor:
    """Select this rank's ``num_rows`` rows from ``x``, which has the rows of full sequences."""
    size, rank = (parallel.group.size, parallel.group.rank) if parallel.sequence_parallel else (1, 0)
    if parallel.context.size > 1:
        x = x[parallel.positions(num_rows * size, x.device)]
    return x[rank * num_rows : (rank + 1) * num_rows]


# Expert capacity, applied to full samples so that dropped choices do not depend on the layout.


@torch.no_grad()
def capacity_mask(
    experts: torch.Tensor,
    weights: torch.Tensor,
    args: ModelArgs,
    parallel: ParallelContext,
    *,
    layer: int = 0,
    is_training: bool = True,
) -> torch.Tensor:
    """Return a mask [s, b, k], True for each choice that is kept.

    For each sample and expert, the first ``args.capacity`` choices are kept. ``moe_token_drop_policy`` sets the order:
    by weight (ties by position), by position, or random. Collective if ranks have shards of a sequence.

    Args:
        layer: index of the layer, whose random order differs from those of other layers.

    Shapes:
        experts, weights [s, b, k], or this rank's shard of them
    """
    num_experts, local_length = args.num_experts, len(experts)
    scores = torch.full((*experts.shape[:2], num_experts), -1.0, dtype=weights.dtype, device=weights.device)
    scores.scatter_(-1, experts, weights)  # [s, b, E], negative where not chosen
    all_scores = gather_tokens(scores, parallel)
    capacity = args.capacity(len(all_scores), is_training=is_training)
    is_chosen = all_scores >= 0
    if args.moe_token_drop_policy == "position":
        priority = is_chosen.long().cumsum(0) - 1
    else:
        if args.moe_token_drop_policy == "random":
            random_scores = _random_scores(all_scores, parallel, layer, is_training=is_training)
            all_scores = torch.where(is_chosen, random_scores, -1.0)
        order = all_scores.sort(dim=0, descending=True, stable=True).indices
        priority = torch.empty_like(order).scatter_(0, order, _position_indices(order))
    is_kept = is_chosen & (priority < capacity)
    return select_tokens(is_kept, local_length, parallel).gather(-1, experts)


def _random_scores(like: torch.Tensor, parallel: ParallelContext, layer: int, *, is_training: bool) -> torch.Tensor:
    """Draw a number in [0, 1) for each token and expert [s, b, E]; the same in every layout and in recomputation.

    A sample's numbers depend on the seed, the step, the sample's index in the step and the layer. In evaluation, all
    samples have the same numbers.
    """
    position, (num_tokens, num_samples, num_experts) = parallel.streams.position, like.shape
    step, samples = -1, range(1)
    if is_training:
        first = (position.first_micro_batch + position.micro_batch) * num_samples
        step, samples = position.step, range(first, first + num_samples)
    generator, scores = torch.Generator(like.device), []
    for sample in samples:
        generator.manual_seed(hash_key((parallel.streams.seed, step, sample, layer, "capacity"), 7))
        scores.append(torch.rand(num_tokens, num_experts, generator=generator, device=like.device))
    return torch.stack(scores, dim=1).to(like.dtype).expand_as(like)


def _position_indices(like: torch.Tensor) -> torch.Tensor:
    return torch.arange(len(like), device=like.device).view(-1, 1, 1).expand_as(like)


# The routers of a rank, reduced over ranks after each step.


@dataclass(frozen=True)
class ExpertLoad:
    """Expert choices of all routers in a global batch; the same on every rank and in every layout.

    Attributes:
        layers: names of the layers with experts, such as "layers.2", in order.
        tokens: int64 [layers, E]: choices per expert, including dropped ones.
        dropped: int64 [layers]: choices dropped by the expert capacity.
    """

    layers: tuple[str, ...]
    tokens: torch.Tensor
    dropped: torch.Tensor

    def imbalance(self) -> list[float]:
        """Return, per layer, the choices of the busiest expert divided by the mean: 1 is even, E / k is the maximum."""
        tokens = self.tokens.double()
        ratios: list[float] = (tokens.amax(1) / tokens.mean(1)).tolist()
        return ratios

    def entropy(self) -> list[float]:
        """Return, per layer, the entropy of the experts' shares over ln E: 1 is even, ln k / ln E is the minimum."""
        tokens = self.tokens.double()
        entropy = torch.special.entr(tokens / tokens.sum(1, keepdim=True)).sum(1) / math.log(tokens.shape[1])
        ratios: list[float] = entropy.tolist()
        return ratios

    def dropped_share(self) -> list[float]:
        """Return, per layer, the share of choices dropped by the expert capacity."""
        shares: list[float] = (self.dropped.double() / self.tokens.sum(1)).tolist()
        return shares


class Routers:
    """The routers of this rank's modules. Reduces their counts over all ranks that process a global batch.

    Construction is collective: ranks exchange the names of their layers with experts.

    Args:
        sequence_parallel: tensor ranks process different tokens.

    Attributes:
        layers: as in ``ExpertLoad``.
    """

    def __init__(self, module: nn.Module, grid: Grid, *, sequence_parallel: bool = False) -> None:
        routers = named_routers(named_modules(module))
        self._routers = list(routers.values())
        self._grid = grid
        self._groups = [grid.data_context, *([grid.tensor] if sequence_parallel else [])]
        self._scale = 1.0
        for router in self._routers:
            router.replicas = grid.data
        sizes_by_rank = grid.host.gather_objects(
            {name: (r.model_args.num_experts, tuple(r.model_args.aux_losses)) for name, r in routers.items()}
        )
        sizes = {name: size for sizes_of_rank in sizes_by_rank for name, size in sizes_of_rank.items()}
        experts = {name: num_experts for name, (num_experts, _) in sizes.items()}
        types = {balancing_type for _, balancing_types in sizes.values() for balancing_type in balancing_types}
        self._types = [balancing_type for balancing_type in AUX_LOSSES if balancing_type in types]
        names = sorted(experts, key=_natural_sort_key)
        self.layers = _layer_names(names)
        self._row_indices = [names.index(name) for name in routers]
        self._num_experts = max(experts.values(), default=0)

    def set_scale(self, scale: float) -> None:
        """Set the factor by which the auxiliary losses, like the loss of each token, are multiplied before backward."""
        self._scale = scale
        for router in self._routers:
            router.gradient_scale = scale

    @torch.no_grad()
    def end_step(
        self, factor: float, device: torch.device, *, is_step_applied: bool
    ) -> tuple[dict[str, float], ExpertLoad]:
        """Return the auxiliary losses of the global batch by name, summed over layers, and the expert load. Collective.

        Args:
            factor: factor by which the optimizer step multiplied the accumulated gradients to average them over the
                global batch; applied to the losses in the same way.
            is_step_applied: the optimizer has updated the weights. If it skipped the step, the routers are not updated
                either.
        """
        num_experts = self._num_experts
        # in fp64, so that counts stay exact
        table = torch.zeros(len(self.layers), num_experts + 1 + NUM_LOSSES, dtype=torch.float64, device=device)
        for router in self._routers:
            router.loss_sums = router.loss_sums.to(device)  # copied in the first step only
        counters = [torch.cat([router.counts, router.dropped, router.loss_sums]) for router in self._routers]
        for row, router, router_counts in zip(
            self._row_indices, self._routers, self._reduce_counters(counters), strict=True
        ):
            table[row] = router_counts
            if is_step_applied:
                router.update_balance(router_counts[:num_experts].long())
            router.clear()
        if self._grid.pipe.size > 1:  # each row is zero on all stages but one
            dist.all_reduce(table, group=self._grid.pipe.handle)
        table = table.cpu()
        *aux, z = (table[:, -NUM_LOSSES:].sum(0) * (self._scale * factor)).tolist()
        counts = table[:, :-NUM_LOSSES].long()
        load = ExpertLoad(self.layers, counts[:, :num_experts], counts[:, num_experts])
        by_type = dict(zip(AUX_LOSSES, aux, strict=True))
        several = {LOSS_NAMES[name]: by_type[name] for name in self._types} if len(self._types) > 1 else {}
        return {"moe_aux_loss": sum(aux), "moe_z_loss": z, **several}, load

    def _reduce_counters(self, counters: list[torch.Tensor]) -> list[torch.Tensor]:
        if not counters:
            return []
        counter_table = torch.stack(counters)
        for group in self._groups:
            if group.size > 1:
                dist.all_reduce(counter_table, group=group.handle)
        return list(counter_table)


def named_routers(modules: Iterable[tuple[str, nn.Module]]) -> dict[str, Router]:
    """Return the routers among ``modules``, by name."""
    return {name: module for name, module in modules if isinstance(module, Router)}


def _layer_names(names: Sequence[str]) -> tuple[str, ...]:
    """Return router names shortened to the name of their layer; unchanged if a layer has several routers."""
    layers = [layer.group() if (layer := re.match(r"(?:.*?\.)??\d+(?=\.)", name)) else name for name in names]
    return tuple(layers if len(set(layers)) == len(layers) else names)


def _natural_sort_key(name: str) -> list[str]:
    return [
        name_component.zfill(9) if name_component.isdigit() else name_component for name_component in name.split(".")
    ]
