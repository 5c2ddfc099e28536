"""What is thought of each step: good, or bad for a loss or gradient norm that is not finite or far above the last ones.

| --stability-guard | a bad step | after --stability-patience of them in a row |
|---|---|---|
| off | not finite: ends the run (the engine's and the optimizer's checks); far above: is told | |
| skip | is left out on all ranks: weights, moments and loss scale as before | ends the run |
| rollback | as skip | back to the last good checkpoint, behind the bad data (``rollback``) |

An overflow of fp16 that a smaller loss scale can cure is neither good nor bad. What decides is saved with the run, so
that one that was stopped or killed goes on deciding alike.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from megatron.config.stability import StabilityConfig
from megatron.mpu.groups import Group
from megatron.mpu.mappings import all_reduce
from megatron.training.engines import StepEngine
from megatron.training.recent import Recent
from megatron.training.step_result import StepResult


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


class Guard:
    """Judges the steps of one run; made on every rank, and the same on all of them.

    Attributes:
        seen: loss and gradient norm of the last step that was judged; infinite where any rank has no number. The norm
            is NaN where the loss is no number.
    """

    def __init__(self, settings: StabilityConfig) -> None:
        self.settings = settings
        self.losses = Recent(settings.stability_window, settings.stability_sigma)
        self.norms = Recent(settings.stability_window, settings.stability_sigma)
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
        self.losses = Recent(settings.stability_window, settings.stability_sigma, kept.pop("losses", ()))
        self.norms = Recent(settings.stability_window, settings.stability_sigma, kept.pop("norms", ()))
        self.history = History(**kept)
