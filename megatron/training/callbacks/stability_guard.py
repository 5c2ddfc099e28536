"""StabilityGuard: judges each step before the update; skips it or rolls back.

| --stability-guard | a bad step | after --stability-patience of them in a row |
|---|---|---|
| off | not finite: ends the run (the engine's and the optimizer's checks); far above: is told | |
| skip | is left out on all ranks: weights, moments and loss scale as before | ends the run |
| rollback | as skip | back to the last good checkpoint, behind the bad data |

An overflow of fp16 that a smaller loss scale can cure is neither good nor bad. What decides is saved with the run, so
that one that was stopped or killed goes on deciding alike.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from megatron.config.stability import StabilityConfig
from megatron.errors import CheckpointError, NumericsError
from megatron.mpu.mappings import all_reduce
from megatron.training.callback_states import GUARD
from megatron.training.callbacks.anomalous_values import bad_gradients, bad_losses
from megatron.training.callbacks.checkpointer import Checkpointer
from megatron.training.callbacks.running_statistics import RunningStatistics
from megatron.training.callbacks.stability_journal import NAME, EventLog
from megatron.training.step_result import LossError, StepResult
from megatron.training.step_samples import range_text
from megatron.training.trainer import Callback

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
            trainer.engine.optimizer.policy.accepts_step = self._allows
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
