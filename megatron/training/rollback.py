"""What follows a bad step: skipped, rolled back, or the end with samples and modules named."""

from __future__ import annotations

from typing import Any

import torch

from megatron.checkpoint import named_parameters
from megatron.errors import CheckpointError, NumericsError
from megatron.mpu.groups import Grid
from megatron.training.checkpointing import await_saves, roll_back
from megatron.training.run import Run
from megatron.training.stability_guard import NAME
from megatron.training.train_step import LossError, ModuleError, StepEngine, StepResult, StepSamples, range_text

# What follows a bad step: a line and a record, the end of a run that has no patience left, or the way back.
#
# Going back takes weights, optimizer, loss scale, random states and counters of the newest checkpoint that is not
# younger than the last good step, and leaves out all data from there to the end of the bad steps. Steps and learning
# rate go on from the checkpoint; the data go on behind.
#
# Source: Chowdhery et al. 2022, "PaLM", section 5.1 (restart before a spike and skip the batches around it).

MOST_RETURNS = 3
"""To one checkpoint, without a good one after it: what fails so often has another cause than its data."""


def after_bad_step(run: Run, result: StepResult, samples: StepSamples) -> bool:
    """Do what follows a step that the guard has found bad; return whether the run has gone back. Collective.

    Raises:
        NumericsError: too many bad steps in a row, and no way back; the same on every rank.
    """
    guard, reason = run.guard, result.problem or ""
    _log_line(run, f"step {samples.step} | {'skipped' if result.is_refused else 'spike'}: {reason} | {samples.text}")
    if not result.is_refused:
        return False
    place = {"step": samples.step, "first_sample": samples.first, "last_sample": samples.last}
    numbers = dict(zip(("loss", "grad_norm"), guard.seen, strict=True))  # orjson writes null for what is no number
    _record(run, {"event": "skipped", **place, **numbers, "reason": reason})
    if not guard.is_out_of_patience:
        return False
    if not guard.settings.goes_back:
        await_saves(run)
        raise _gives_up(run, samples, reason)
    _go_back(run, samples, reason)
    return True


def _go_back(run: Run, samples: StepSamples, reason: str) -> None:
    """Return to the last good checkpoint and go on behind ``samples``. Collective."""
    history = run.guard.history
    steps = history.streak
    try:
        checkpoint = roll_back(run, up_to_step=history.good_step)
    except CheckpointError as error:
        raise _gives_up(run, samples, reason, f" There is no checkpoint to go back to: {error}") from error
    first, step = run.progress.samples_consumed, run.progress.step
    run.progress.samples_consumed = samples.last + 1
    _count_return(run, history.events, step, history)
    if run.guard.history.returns > MOST_RETURNS:
        told = f" It has gone back to {checkpoint} {MOST_RETURNS} times already, which has not helped."
        raise _gives_up(run, samples, reason, told)
    left_out = {"first_sample": first, "last_sample": samples.last}
    _record(run, {"event": "went back", "step": samples.step, "to_step": step, "bad_steps": steps, **left_out,
                  "checkpoint": checkpoint.name, "reason": reason})  # fmt: skip
    _log_line(
        run,
        f"step {samples.step} | {steps} bad steps in a row: back to {checkpoint}, step {step}; "
        f"{range_text(first, samples.last)} left out",
    )


def _count_return(run: Run, events: int, step: int, before: Any) -> None:
    """Keep what the checkpoint cannot know: the records since, and how often it has been gone back to."""
    now = run.guard.history
    now.events = events
    now.returns = before.returns + 1 if before.returned_to == step else 1
    now.returned_to = step
    now.streak, now.good_step = 0, step


def _record(run: Run, record: dict[str, Any]) -> None:
    history = run.guard.history
    history.events += 1
    if run.journal is not None:
        run.journal.add({"number": history.events, **record})


def _log_line(run: Run, line: str) -> None:
    if run.screen is not None:
        run.screen.line(line)


def _gives_up(run: Run, samples: StepSamples, reason: str, more: str = "") -> NumericsError:
    guard = run.guard.settings.stability_guard
    other = "" if guard == "rollback" else " --stability-guard rollback goes back to a checkpoint instead."
    error = NumericsError(
        f"less than --stability-patience {run.guard.settings.stability_patience} steps in a row may be bad, got so "
        f"many up to step {samples.step} ({samples.text}): {reason}.{more} {run.folder / NAME} has them all; their "
        f"updates were left out. Look at their samples, lower --lr, or load an older checkpoint.{other}"
    )
    error.is_of_this_rank = False
    return error


# What a run says that ends for a number that is not finite: the step and its samples, and where the number is.
#
# All ranks raise at the same place, ahead of the update. Those that hold the number say so themselves, rank 0 the rest.

NAMED_AT_MOST = 3


def explain_nonfinite(error: NumericsError, engine: StepEngine, grid: Grid, samples: StepSamples) -> NumericsError:
    """Return ``error`` of the step that read ``samples``, with what this rank knows of it. Waits for the device."""
    if isinstance(error, ModuleError):
        found = error.found
    elif isinstance(error, LossError):
        found = bad_losses(engine, grid, samples)
    else:
        found = bad_gradients(engine, grid)
    told = f"step {samples.step} ({samples.text}): {error}"
    made = NumericsError(f"{told} Here {found}." if found else told)
    made.is_of_this_rank = bool(found)
    return made


def bad_losses(engine: StepEngine, grid: Grid, samples: StepSamples) -> str:
    """Say which micro-batches of this rank have a loss that is not finite; the first tensor rank speaks for all."""
    if grid.tensor.rank:
        return ""
    bad = [number for number, loss in engine.micro_losses.items() if not loss.isfinite().all()]
    each = [f"micro-batch {n} ({samples.of_micro_batch(grid.data.rank, n)})" for n in bad]
    return f"{_listed(each)} gave such a loss" if each else ""


@torch.no_grad()
def bad_gradients(engine: StepEngine, grid: Grid) -> str:
    """Say which parameters of this rank have a gradient that is not finite; the first replica speaks for all.

    From ZeRO 2 on each replica speaks for its parts.
    """
    if grid.data.rank and not engine.optimizer.cuts_gradients:
        return ""
    bad = []
    for name, parameter in named_parameters(engine.module):
        gradient = engine.optimizer.gradient_of(parameter) if parameter.requires_grad else None
        if gradient is not None and not gradient.isfinite().all():
            bad.append(name)
    return f"the gradient of {_listed(bad)} is not finite" if bad else ""


def _listed(items: list[str]) -> str:
    more = f" and {len(items) - NAMED_AT_MOST} more" if len(items) > NAMED_AT_MOST else ""
    return ", ".join(items[:NAMED_AT_MOST]) + more
