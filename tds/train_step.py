"""What follows the last backward: the loss of all replicas, the sums of gradients, the optimizer's step."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from tds import report
from tds.agreement import Agreement, agree_on_loss
from tds.batches import BatchSource
from tds.engine_parts import EngineParts
from tds.gradients import GradientSource, reduce_gradients, sum_tied
from tds.loss import LossMeter
from tds.norm import clip, global_norm, is_counted
from tds.peers import waiting_together
from tds.reduction import Reduction
from tds.report import REDUCTION, STEP


def finish(
    engine: EngineParts,
    meter: LossMeter,
    gradients: GradientSource | None,
    reduction: Reduction | None = None,
    source: BatchSource | None = None,
) -> torch.Tensor:
    """Reduce, step, and return the mean loss of the global batch; others go to ``engine.agg_additional_losses``.

    Collective. Every rank runs the same in the same order: the sums over replicas that the backward has not started
    yet, the losses, the sums of tied weights, the wait for all sums. Only then may ``on_loss`` or what is wrong with
    the losses raise: nothing is in flight.

    Args:
        reduction: sums over replicas, some of them under way; None to start and await them here.
        source: where the micro-batches came from; it may raise where ``on_loss`` may.
    """
    if gradients is None:
        raise RuntimeError("train_batch needs an optimizer; pass one to initialize or name one in the JSON")
    if reduction is not None:
        reduction.start_rest()
    agreement = agree(engine, meter)
    if source is not None:
        source.read_ahead()
    doing = "adding up the gradients of tied weights and replicas"
    with waiting_together(engine.stage_id, doing), engine.report.part(REDUCTION):
        add_up_tied(engine, gradients)
        if gradients.are_multiplied_in_step:
            add_up_replicas(engine, gradients, reduction, 1.0)
            read_with_norm(engine.optimizer, agreement)
        else:
            add_up_replicas(engine, gradients, reduction, agreement.factor)
    with forgetting(engine, gradients):
        if source is not None:
            source.end(meter.num_micro_batches)
        engine.means = means = agreement.means()
        if engine.on_loss is not None:
            engine.on_loss(means.loss)
    take_step(engine, gradients)
    engine.agg_train_loss, engine.agg_additional_losses = means.loss, means.additional or None
    report.write_training(engine, means)
    return means.loss


def add_up_tied(engine: EngineParts, gradients: GradientSource) -> None:
    """Give each copy of a tied weight the gradient of all, on this replica; ahead of the replicas' sum. Collective."""
    sum_tied(engine.module.get_tied_weights_and_groups(), gradients.of, engine.sums_dtype)


def add_up_replicas(engine: EngineParts, gradients: GradientSource, reduction: Reduction | None, factor: float) -> None:
    """Replace each gradient by the sum over the replicas times ``factor``; await what is under way. Collective."""
    if reduction is not None:
        reduction.finish(factor)
        return
    data_group = engine.grid.get_data_parallel_group() if engine.grid.data_parallel_size > 1 else None
    reduce_gradients([gradients.of(p) for p in trained(engine)], data_group, factor)


def read_with_norm(optimizer: Any, agreement: Agreement) -> None:
    """Wait for losses and gradient norm at once, and hand ``optimizer`` norm and factor. Collective."""
    (optimizer.raw_norm,) = agreement.read(optimizer.norm_of_sums())
    optimizer.gradient_factor = agreement.factor


def take_step(engine: EngineParts, gradients: GradientSource) -> None:
    """Let DeepSpeed clip, step and count, with gradients as they are to be. Collective."""
    scale = gradients.loss_scale()
    engine._force_grad_boundary = True
    engine._has_untaken_gradients = True  # after an error they may still be looked at; the next batch drops them
    try:
        with engine.report.part(STEP):
            gradients.before_step()
            engine.take_model_step()
    finally:
        engine._force_grad_boundary = False
    engine._has_untaken_gradients = False
    gradients.after_step()
    if gradients.norm_is_scaled:
        engine.grad_norm = float(engine.grad_norm) / scale


@contextmanager
def forgetting(engine: EngineParts, gradients: GradientSource | None) -> Iterator[None]:
    """Let an error within leave no gradients behind, which the next batch would add to."""
    try:
        yield
    except BaseException:
        forget(engine, gradients)
        raise


def forget(engine: EngineParts, gradients: GradientSource | None) -> None:
    """Drop the gradients of a batch that took no step."""
    engine.zero_grad()
    if gradients is not None:
        gradients.forget()
    engine._has_untaken_gradients = False


def agree(engine: EngineParts, meter: LossMeter) -> Agreement:
    """Return what the losses of all replicas came to, the same on every rank. Collective."""
    grid = engine.grid
    with waiting_together(engine.stage_id, "agreeing on the loss"):
        return agree_on_loss(
            meter if engine.is_last_stage() else None,
            data_group=grid.get_data_parallel_group(),
            data_size=grid.data_parallel_size,
            pipe_group=grid.get_pipe_parallel_group(),
            pipe_size=grid.pipe_parallel_size,
            last_rank=grid.stage_to_global(engine.num_stages - 1),
            device=engine.device,
        )


def trained(engine: EngineParts) -> list[torch.nn.Parameter]:
    """Return this stage's parameters that have gradients, in the order of the module."""
    return [p for p in engine.module.parameters() if p.requires_grad]


def refuse_unfrozen(
    engine: EngineParts, gradients: GradientSource | None, known: Collection[torch.nn.Parameter]
) -> None:
    """Raise where a weight has been unfrozen that DeepSpeed's optimizer would never update.

    Args:
        known: the parameters that were trained when the optimizer put them into buffers of its own.
    """
    if gradients is None or gradients.takes_unfrozen:
        return
    for name, parameter in engine.module.named_parameters():
        if parameter.requires_grad and parameter not in known:
            raise RuntimeError(
                f"{type(engine.optimizer).__name__} updates only what is trained when tds.initialize is called, got "
                f"{name}, which was unfrozen since. Unfreeze it ahead of tds.initialize (a learning rate of 0 in a "
                "parameter group of its own keeps it as it is), or save, and load into a new engine"
            )


@torch.no_grad()
def clip_gradients(engine: EngineParts, gradients: GradientSource | None) -> None:
    """Clip to the JSON's gradient_clipping and record the norm, unless the optimizer does so itself. Collective."""
    if gradients is None or gradients.clips_itself:
        return
    parameters = trained(engine)
    tensor_rank = engine.grid.get_slice_parallel_rank()
    counted = [gradients.of(p) for p in parameters if is_counted(p, tensor_rank)]
    with waiting_together(engine.stage_id, "taking the norm of the gradients"):
        norm = global_norm(counted, engine.grid.get_model_parallel_group(), engine.device)
    clip([gradients.of(p) for p in parameters], norm, engine.gradient_clipping())
    engine.grad_norm = float(norm)
