"""StabilityGuard: each step judged before the update; its history and stability.jsonl."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import orjson
import torch
import torch.distributed as dist

from megatron import files, log
from megatron.config.run import StabilityConfig
from megatron.mpu.groups import Group
from megatron.mpu.mappings import all_reduce
from megatron.training.train_step import StepEngine, StepResult

# The last values of a number that should not jump, and from where on a new one does.

SMALLEST_SPREAD = 1.0e-3  # of the mean: values that hardly differ make no small step a jump


class RunningStatistics:
    """The last ``size`` values; a new one is far above them where it is more than ``sigma`` deviations above the mean.

    The deviation counts as at least ``SMALLEST_SPREAD`` of the mean. Half of the values must be there to judge by.
    Sums are exact, so that all ranks, and a run that goes on, judge alike by the same values.
    """

    def __init__(self, size: int, sigma: float, values: Iterable[float] = ()) -> None:
        self.values: deque[float] = deque(values, maxlen=size)
        self.sigma = sigma

    def add(self, value: float) -> None:
        """Let ``value`` take the place of the oldest; one that is not finite is left out."""
        if math.isfinite(value):
            self.values.append(value)

    def limit(self) -> float:
        """Return from where on a value is far above; infinite while there are too few to judge by."""
        number = len(self.values)
        if number < (self.values.maxlen or 0) / 2:
            return math.inf
        mean = math.fsum(self.values) / number
        spread = math.sqrt(math.fsum((value - mean) ** 2 for value in self.values) / number)
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
# | rollback | as skip | back to the last good checkpoint, behind the bad data (``rollback``) |
#
# An overflow of fp16 that a smaller loss scale can cure is neither good nor bad. What decides is saved with the run, so
# that one that was stopped or killed goes on deciding alike.


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


class StabilityGuard:
    """Judges the steps of one run; made on every rank, and the same on all of them.

    Attributes:
        seen: loss and gradient norm of the last step that was judged; infinite where any rank has no number. The norm
            is NaN where the loss is no number.
    """

    def __init__(self, settings: StabilityConfig) -> None:
        self.settings = settings
        self.losses = RunningStatistics(settings.stability_window, settings.stability_sigma)
        self.norms = RunningStatistics(settings.stability_window, settings.stability_sigma)
        self.history = History()
        self._loss = math.nan
        self._reason: str | None = None
        self.seen = math.nan, math.nan

    def watch(self, engine: StepEngine, world: Group, device: torch.device, step: int) -> None:
        """Have a word before each update of ``engine``, if bad steps are to be skipped.

        Args:
            step: steps done.
        """
        if not self.history.streak:
            self.history.good_step = step
        if not self.settings.is_guarded:
            return
        optimizer = engine.optimizer

        def worst(value: float) -> float:
            values = [value if math.isfinite(value) else math.inf]
            agreed = all_reduce(torch.tensor(values, dtype=torch.float64, device=device), world, dist.ReduceOp.MAX)
            return agreed.item()

        def take_loss(loss: float) -> None:
            self._loss = worst(loss)  # all ranks forget their gradients or none: the norm is then taken anew, together
            if not math.isfinite(self._loss):  # its gradients are of no use, and no overflow for the scale to follow
                optimizer.zero_grad()

        def allows(norm: float) -> bool:
            loss, norm = self._loss, worst(norm)
            has_gradients = math.isfinite(loss)  # else they were thrown away ahead of the norm
            self.seen, self._reason = (loss, norm if has_gradients else math.nan), self.problem(loss, norm)
            return self._reason is None

        engine.on_loss = take_loss
        optimizer.judge = allows

    def problem(self, loss: float, norm: float) -> str | None:
        """Return what is wrong with a step of this loss and gradient norm, or None."""
        return self.losses.problem("loss", loss) or self.norms.problem("gradient norm", norm)

    def note(self, result: StepResult, step: int) -> StepResult:
        """Take note of a finished step; return it with the problem that it has, if any.

        A refused one comes back with the numbers that all ranks found: those of this rank may be sound.

        Args:
            step: steps done, with this one.
        """
        if result.is_overflow:
            return result
        if self.settings.is_guarded:
            (loss, norm), problem = self.seen, self._reason
        else:
            loss, norm = result.loss, result.grad_norm
            problem = self.problem(loss, norm)
        if result.is_refused:
            self.history.streak += 1
            return replace(result, problem=problem, loss=loss, grad_norm=norm)
        self.losses.add(loss)
        self.norms.add(norm)
        self.history.streak, self.history.good_step = 0, step
        return replace(result, problem=problem) if problem else result

    @property
    def may_go_back(self) -> bool:
        """True amidst bad steps that may lead back to the checkpoint before them."""
        return self.settings.stability_guard == "rollback" and self.history.streak > 0

    @property
    def is_out_of_patience(self) -> bool:
        """True once there have been as many bad steps in a row as --stability-patience says."""
        return self.history.streak >= self.settings.stability_patience

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps: plain data, the same on every rank."""
        return {"losses": list(self.losses.values), "norms": list(self.norms.values), **vars(self.history)}

    def load(self, state: Mapping[str, Any] | None) -> None:
        """Go on from ``state``; from nothing where the checkpoint is older than the guard."""
        settings, kept = self.settings, dict(state or {})
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


# Which samples a step, or a micro-batch of one rank, has read: for messages about bad numbers.
