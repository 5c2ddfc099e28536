"""Conversion of the losses that Megatron users return: scalars, (sum, count) pairs, dictionaries."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from megatron.models.common.router import Routers
from megatron.mpu.groups import SINGLE, Grid, Group
from megatron.mpu.mappings import all_reduce
from megatron.optim import MixedPrecisionOptimizer
from megatron.training.step_result import StepResult
from tds.loss import Weighted, WrappedLoss, named_losses
from tds.user_functions import LossFn


def as_weighted(loss: Any) -> Any:
    """Convert a plain pair (sum, count), as in Megatron's scripts, to ``tds.loss.Weighted``; keep other losses.

    In a dictionary, each loss is converted.
    """
    if isinstance(loss, Mapping):
        return {name: as_weighted(value) for name, value in loss.items()}
    is_pair = isinstance(loss, (tuple, list)) and not hasattr(loss, "_fields") and len(loss) == 2
    return Weighted(*loss) if is_pair else loss


def with_weighted_pairs(loss_fn: LossFn | None) -> WrappedLoss:
    """Wrap ``loss_fn`` (None: the output is the loss) to convert plain pairs to ``Weighted``."""

    def weighted_loss(output: Any, labels: Any) -> Any:
        return as_weighted(output if loss_fn is None else loss_fn(output, labels))

    return WrappedLoss(weighted_loss, loss_fn)


def mean_of_micro_batch(loss: Any, context: Group = SINGLE) -> Any:
    """Replace the training loss by its mean over the micro-batch, for ``--loss-average micro-batch``. Collective.

    The engines average such a scalar with equal weights over micro-batches, replicas and context ranks. The mean
    includes the micro-batch's counted tokens on all context ranks, so it does not depend on how sequences are sharded.
    Without counted tokens the mean is 0. Losses that are only reported are unchanged.

    Args:
        loss: return value of a loss function, with pairs as ``Weighted``.
        context: ranks that share the micro-batch's sequences.

    Source: Megatron-LM, core/pipeline_parallel/schedules.py, ``forward_step_calc_loss``, which divides by the tokens of
    the context rank.
    """
    if isinstance(loss, Weighted):
        count = torch.as_tensor(loss.count, device=loss.total.device).to(loss.total.dtype, copy=True)
        return loss.total * context.size / all_reduce(count, context).clamp(min=1)
    if isinstance(loss, torch.Tensor):
        return loss
    losses = named_losses(loss, 0)
    trained_name = next(iter(losses))
    return {**losses, trained_name: mean_of_micro_batch(losses[trained_name], context)}


def scalars(report: dict[str, Any], loss: Any) -> dict[str, torch.Tensor]:
    """Select a report's values to average: tensors with one element, except the loss itself."""
    return {
        name: value
        for name, value in report.items()
        if value is not loss and isinstance(value, torch.Tensor) and value.numel() == 1
    }


def nominal_weight(tokens_per_step: float) -> float:
    """Return the power of two nearest to the token count of a step.

    Gradients are divided by it before accumulation. This keeps fp16 gradients in range, and dividing by a power of two
    does not round.
    """
    return 2.0 ** round(math.log2(max(tokens_per_step, 1)))


def token_weight(tokens_per_step: float, grid: Grid, *, is_mean: bool) -> float:
    """Return the divisor for one token's loss in the backward pass, before loss scaling.

    Args:
        tokens_per_step: tokens per step over all replicas.
        is_mean: a micro-batch's loss is the mean over its tokens, not a pair (sum, count).
    """
    return tokens_per_step / grid.data_context.size if is_mean else nominal_weight(tokens_per_step)


def with_router_losses(
    result: StepResult, routers: Routers, optimizer: MixedPrecisionOptimizer, device: torch.device
) -> StepResult:
    """Finish the routers' step; add router losses and expert load to ``result``. Collective."""
    losses, result.expert_load = routers.end_step(optimizer.last_factor, device, is_step_applied=not result.is_skipped)
    result.losses |= losses
    return result
