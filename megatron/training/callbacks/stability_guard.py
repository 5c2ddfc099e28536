"""StabilityGuard: each step judged before the update, what follows a bad one, and stability.jsonl."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
import torch
import torch.distributed as dist

from megatron import files, log
from megatron.checkpoint import named_parameters
from megatron.config.run import StabilityConfig
from megatron.errors import CheckpointError, NumericsError
from megatron.mpu.groups import Grid
from megatron.mpu.mappings import all_reduce
from megatron.training.callbacks.checkpointer import GUARD, Checkpointer
from megatron.training.train_step import LossError, StepEngine, StepResult, StepSamples, range_text
from megatron.training.trainer import Callback

# The last values of a number that should not jump, and from where on a new one does.

SMALLEST_SPREAD = 1.0e-3  # of the mean: values that hardly differ make no small step a jump


class RunningStatistics:
    """The last ``size`` values; a new one is far above them where it is more than ``sigma`` deviations above the mean.

    The deviation counts as at least ``SMALLEST_SPREAD`` of the mean. Half of the values must be there to judge by.
    Sums are exact, so that all ranks, and a run that goes on, judge alike by the same values.
    """

    def __init__(self, size: int, sigma: float, values: Iterable[float] = ()) -> None:
        self.values: deque[float] = deque(values, maxlen=size)
        self.size, self.sigma = size, sigma

    def add(self, value: float) -> None:
        """Let ``value`` take the place of the oldest; one that is not finite is left out."""
        if math.isfinite(value):
            self.values.append(value)

    def mean(self) -> float:
        """Return the mean; infinite while there are too few to judge by."""
        return math.fsum(self.values) / len(self.values) if 2 * len(self.values) >= self.size else math.inf

    def limit(self) -> float:
        """Return from where on a value is far above; infinite while there are too few to judge by."""
        mean = self.mean()
        spread = math.sqrt(math.fsum((value - mean) ** 2 for value in self.values) / max(len(self.values), 1))
        return mean + self.sigma * max(spread, SMALLEST_SPREAD * abs(mean))

    def problem(self, name: str, value: float) -> str | None:
        """Return what is wrong with a new ``value``, in words, or None."""
        if not math.isfinite(value):
            return f"the {name} is not finite"
        limit = self.limit()
        if value <= limit:
            return None
        return (
            f"the {name} {value:.4g} is above {limit:.4g}, {self.sigma:g} deviations above the last {len(self.values)}"
        )


# What is thought of each step: good, or bad for a loss or gradient norm that is not finite or far above the last ones.
#
# | --stability-guard | a bad step | after --stability-patience of them in a row |
# |---|---|---|
# | off | not finite: ends the run (the engine's and the optimizer's checks); far above: is told | |
# | skip | is left out on all ranks: weights, moments and loss scale as before | ends the run |
# | rollback | as skip | back to the last good checkpoint, behind the bad data |
#
# An overflow of fp16 that a smaller loss scale can cure is neither good nor bad. What decides is saved with the run, so
# that one that was stopped or killed goes on deciding alike.

MOST_RETURNS = 3
"""To one checkpoint, without a good one after it: what fails so often has another cause than its data."""


@dataclass
class History:
    """What has happened that decides what happens next.

    Attributes:
        streak: bad steps in a row, up to now.
        good_step: steps done when the last good one was.
        events: records written to the journal.
        returns: how often the run has gone back to ``returned_to`` without a new good checkpoint in between.
    """

    streak: int = 0
    good_step: int = 0
    events: int = 0
    returns: int = 0
    returned_to: int = -1


class StabilityGuard(Callback):
    """Judges the steps of a run, and skips bad ones or goes back behind them if that is asked for.

    Going back takes weights, optimizer, loss scale, random states and counters of the newest checkpoint that is not
    younger than the last good step, and leaves out all data from there to the end of the bad steps. Steps and learning
    rate go on from the checkpoint; the data go on behind.

    Attributes:
        seen: loss and gradient norm of the last step that was judged; infinite where any rank has no number. The norm
            is NaN where the loss is no number.

    Source:
        Chowdhery et al. 2022, "PaLM", section 5.1 (restart before a spike and skip the batches around it).
    """

    history: History

    def __init__(self, settings: StabilityConfig) -> None:
        self.settings = settings
        self.load_state_dict({})
        self._loss = math.nan
        self._problem: str | None = None
        self.seen = math.nan, math.nan
        self._journal: EventLog | None = None
        self._checkpointer: Checkpointer | None = None

    @property
    def name(self) -> str:
        return GUARD

    # What is thought of a step.

    def on_train_start(self) -> None:
        """Have a word before each update, if bad steps are to be skipped."""
        trainer = self.trainer
        self._checkpointer = trainer.find(Checkpointer)
        if not self.history.streak:
            self.history.good_step = trainer.progress.step
        if self.settings.is_guarded:
            trainer.engine.optimizer.judge = self._allows
            if trainer.world.rank == 0:
                self._journal = EventLog(trainer.folder, self.history.events)

    def on_before_update(self, loss: float) -> None:
        if not self.settings.is_guarded:
            return
        self._loss = self._worst(
            loss
        )  # all ranks forget their gradients or none: the norm is then taken anew, together
        if not math.isfinite(self._loss):  # its gradients are of no use, and no overflow for the scale to follow
            self.trainer.engine.optimizer.zero_grad()

    def _allows(self, norm: float) -> bool:
        """Return whether the update may be made, the same on every rank: asked by the optimizer ahead of it."""
        loss, norm = self._loss, self._worst(norm)
        has_gradients = math.isfinite(loss)  # else they were thrown away ahead of the norm
        self.seen, self._problem = (loss, norm if has_gradients else math.nan), self.problem(loss, norm)
        return self._problem is None

    def _worst(self, value: float) -> float:
        """Return the greatest value of all ranks, infinite where any has no number. Collective."""
        group, place = self.trainer.world.decision_group
        values = torch.tensor([value if math.isfinite(value) else math.inf], dtype=torch.float64, device=place)
        return all_reduce(values, group, dist.ReduceOp.MAX).item()

    def problem(self, loss: float, norm: float) -> str | None:
        """Return what is wrong with a step of this loss and gradient norm, or None."""
        return self.losses.problem("loss", loss) or self.norms.problem("gradient norm", norm)

    def on_after_update(self, result: StepResult) -> None:
        """Add to ``result`` the problem that it has, if any.

        A refused one gets the numbers that all ranks found: those of this rank may be sound.
        """
        if result.is_overflow:
            return
        if self.settings.is_guarded:
            (loss, norm), result.problem = self.seen, self._problem
        else:
            loss, norm = result.loss, result.grad_norm
            result.problem = self.problem(loss, norm)
        if result.is_refused:
            self.history.streak += 1
            result.loss, result.grad_norm = loss, norm
        else:
            self.losses.add(loss)
            self.norms.add(norm)
            self.history.streak, self.history.good_step = 0, self.trainer.samples.step

    # What follows a bad step: a line and a record, the end of a run that has no patience left, or the way back.

    def on_step_end(self, result: StepResult) -> None:
        """Do what follows a step that was found bad. Collective.

        Raises:
            NumericsError: too many bad steps in a row, and no way back; the same on every rank.
        """
        if self._checkpointer is not None:
            self._checkpointer.is_held = self.settings.goes_back and self.history.streak > 0
        if result.problem is not None:
            self._follow(result, result.problem)

    def _follow(self, result: StepResult, reason: str) -> None:
        samples = self.trainer.samples
        kind = "skipped" if result.is_refused else "spike"
        self.trainer.print_line(f"step {samples.step} | {kind}: {reason} | {samples.text}")
        if not result.is_refused:
            return
        place = {"step": samples.step, "first_sample": samples.first, "last_sample": samples.last}
        numbers = dict(zip(("loss", "grad_norm"), self.seen, strict=True))  # orjson writes null for what is no number
        self._record({"event": "skipped", **place, **numbers, "reason": reason})
        if self.history.streak < self.settings.stability_patience:
            return
        if not self.settings.goes_back:
            raise self._gives_up(reason)
        self._go_back(reason)

    def _go_back(self, reason: str) -> None:
        """Return to the last good checkpoint and go on behind this step's samples. Collective."""
        trainer, samples, before = self.trainer, self.trainer.samples, self.history
        if self._checkpointer is None:
            raise self._gives_up(reason, " There is no checkpoint to go back to.")
        self.load_state_dict({})  # what a checkpoint that is older than the guard means
        try:
            checkpoint = self._checkpointer.roll_back(up_to_step=before.good_step)
        except CheckpointError as error:
            self.history = before
            raise self._gives_up(reason, f" There is no checkpoint to go back to: {error}") from error
        first, step = trainer.progress.samples_consumed, trainer.progress.step
        trainer.progress.samples_consumed = samples.last + 1
        trainer.progress.samples_skipped += samples.last + 1 - first  # the learning rate continues from the checkpoint
        self._count_return(step, before)
        if self.history.returns > MOST_RETURNS:
            note = f" It has gone back to {checkpoint} {MOST_RETURNS} times already, which has not helped."
            raise self._gives_up(reason, note)
        left_out = {"first_sample": first, "last_sample": samples.last}
        self._record({"event": "went back", "step": samples.step, "to_step": step, "bad_steps": before.streak,
                      **left_out, "checkpoint": checkpoint.name, "reason": reason})  # fmt: skip
        trainer.print_line(
            f"step {samples.step} | {before.streak} bad steps in a row: back to {checkpoint}, step {step}; "
            f"{range_text(first, samples.last)} left out"
        )

    def _count_return(self, step: int, before: History) -> None:
        """Keep what the checkpoint cannot know: the records since, and how often it has been gone back to."""
        now = self.history
        now.events = before.events
        now.returns = before.returns + 1 if before.returned_to == step else 1
        now.returned_to = step
        now.streak, now.good_step = 0, step

    def _record(self, record: dict[str, Any]) -> None:
        self.history.events += 1
        if self._journal is not None:
            self._journal.add({"number": self.history.events, **record})

    def _gives_up(self, reason: str, more: str = "") -> NumericsError:
        samples, settings = self.trainer.samples, self.settings
        other = "" if settings.goes_back else " --stability-guard rollback goes back to a checkpoint instead."
        error = NumericsError(
            f"less than --stability-patience {settings.stability_patience} steps in a row may be bad, got so many up "
            f"to step {samples.step} ({samples.text}): {reason}.{more} {self.trainer.folder / NAME} has them all; "
            f"their updates were left out. Look at their samples, lower --lr, or load an older checkpoint.{other}"
        )
        error.is_of_this_rank = False
        return error

    # Where a number is that ends the run.

    def find_nonfinite(self, error: NumericsError) -> str | None:
        """Say what this rank knows of it. Waits for the device."""
        find = bad_losses if isinstance(error, LossError) else bad_gradients
        return find(self.trainer.engine, self.trainer.world.grid, self.trainer.samples)

    # What a checkpoint keeps.

    def state_dict(self) -> dict[str, Any]:
        return {"losses": list(self.losses.values), "norms": list(self.norms.values), **vars(self.history)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        settings, kept = self.settings, dict(state)
        self.losses = RunningStatistics(settings.stability_window, settings.stability_sigma, kept.pop("losses", ()))
        self.norms = RunningStatistics(settings.stability_window, settings.stability_sigma, kept.pop("norms", ()))
        self.history = History(**kept)


# The journal of what the stability guard has left out: ``stability.jsonl`` in the run folder, written by rank 0.
#
# Each line is a record with its number: a step that was skipped, or a return to a checkpoint. A record is on the disk
# before the next step begins; a disk that is full costs a warning, not the run. A run that goes on from a checkpoint
# drops the records beyond it, for they come again.

NAME = "stability.jsonl"


class EventLog:
    """The records of one run folder.

    Args:
        known: records that belong to what the run goes on from; later ones are dropped.
    """

    def __init__(self, folder: Path, known: int = 0) -> None:
        self.path = folder / NAME
        everything = read_journal(self.path)
        self.records = [record for record in everything if record["number"] <= known]
        if len(self.records) != len(everything):
            self._write()

    def add(self, record: dict[str, Any]) -> None:
        """Add one record; its number must be the next."""
        self.records.append(record)
        self._write()

    def _write(self) -> None:
        try:
            files.replace_bytes(self.path, b"".join(orjson.dumps(record) + b"\n" for record in self.records))
        except OSError as error:
            log.warning(f"{self.path} could not be written ({error}); the next record tries again with all of them")


def read_journal(path: Path) -> list[dict[str, Any]]:
    """Return the records of a journal, none where there is no file."""
    return [orjson.loads(line) for line in path.read_bytes().splitlines()] if path.exists() else []


# Where this rank has a number that is not finite: all ranks raise at the same place, ahead of the update. Those that
# hold the number say so themselves, rank 0 the rest.

NAMED_AT_MOST = 3


def bad_losses(engine: StepEngine, grid: Grid, samples: StepSamples) -> str:
    """Say which micro-batches of this rank have a loss that is not finite; the first tensor rank speaks for all."""
    if grid.tensor.rank:
        return ""
    bad = [number for number, loss in engine.micro_losses.items() if not loss.isfinite().all()]
    each = [f"micro-batch {n} ({samples.of_micro_batch(grid.data.rank, n)})" for n in bad]
    return f"{_listed(each)} gave such a loss" if each else ""


@torch.no_grad()
def bad_gradients(engine: StepEngine, grid: Grid, samples: StepSamples) -> str:
    """Say which parameters of this rank have a gradient that is not finite; the first replica speaks for all.

    From ZeRO 2 on each replica speaks for its parts.
    """
    if grid.data_context.rank and engine.optimizer.gradient_holders.size == 1:
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
