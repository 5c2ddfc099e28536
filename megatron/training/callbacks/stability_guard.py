"""StabilityGuard: checks each step before the update; skips anomalous steps or rolls back.

| --stability-guard | an anomalous step | after --stability-patience of them in a row |
|---|---|---|
| off | not finite: ends the run (checks of engine and optimizer); far above recent values: reported | |
| skip | skipped on all ranks; weights, moments and loss scale are unchanged | ends the run |
| rollback | as skip | returns to the last good checkpoint and skips the data up to the last anomalous step |

A gradient overflow in fp16 that a smaller loss scale can cure counts neither as good nor as anomalous. The state of the
guard is saved in checkpoints, so that a resumed run makes the same decisions.
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
from megatron.training.callback_states import GUARD_KEY
from megatron.training.callbacks.anomalous_values import describe_nonfinite_gradients, describe_nonfinite_losses
from megatron.training.callbacks.checkpointer import Checkpointer
from megatron.training.callbacks.running_statistics import RunningStatistics
from megatron.training.callbacks.stability_journal import JOURNAL_NAME, EventLog
from megatron.training.step_result import LossError, StepResult
from megatron.training.step_samples import range_text
from megatron.training.trainer import Callback

MAX_ROLLBACKS = 3
"""Maximum number of consecutive rollbacks to the same checkpoint; after that, the data is not the likely cause."""


@dataclass
class History:
    """A run's history, which determines the guard's next decision.

    Attributes:
        streak: consecutive anomalous steps up to now.
        good_step: last good step.
        events: records written to the journal.
        returns: consecutive rollbacks to the checkpoint of step ``returned_to``.
        returned_to: checkpoint step of the last rollback; -1 if there was none.
    """

    streak: int = 0
    good_step: int = 0
    events: int = 0
    returns: int = 0
    returned_to: int = -1


class StabilityGuard(Callback):
    """Checks training steps, and depending on --stability-guard skips anomalous ones or rolls back.

    A rollback restores weights, optimizer, loss scale, random states and counters from the newest checkpoint that is
    not later than the last good step. Steps and learning rate continue from the checkpoint; the data continue after the
    last anomalous step.

    Attributes:
        last_checked: loss and gradient norm of the last checked step; infinite if any rank's value is not finite. The
            norm is NaN if the loss is not finite.

    Source:
        Chowdhery et al. 2022, "PaLM", section 5.1 (restart before a spike and skip the batches around it).
    """

    history: History

    def __init__(self, settings: StabilityConfig) -> None:
        self.settings = settings
        self.load_state_dict({})
        self._loss = math.nan
        self._problem: str | None = None
        self.last_checked = math.nan, math.nan
        self._journal: EventLog | None = None
        self._checkpointer: Checkpointer | None = None

    @property
    def name(self) -> str:
        return GUARD_KEY

    # Checks of a step.

    def on_train_start(self) -> None:
        """With --stability-guard skip or rollback, register ``_accepts_step``, which is called before each update."""
        trainer = self.trainer
        self._checkpointer = trainer.find(Checkpointer)
        if not self.history.streak:
            self.history.good_step = trainer.progress.step
        if self.settings.is_guarded:
            trainer.engine.optimizer.policy.accepts_step = self._accepts_step
            if trainer.world.rank == 0:
                self._journal = EventLog(trainer.folder, self.history.events)

    def on_before_update(self, loss: float) -> None:
        if not self.settings.is_guarded:
            return
        # All ranks discard their gradients or none does, since the norm is collective.
        self._loss = self._max_over_ranks(loss)
        if not math.isfinite(self._loss):  # discarded gradients do not count as an overflow for the loss scale
            self.trainer.engine.optimizer.zero_grad()

    def _accepts_step(self, norm: float) -> bool:
        """Return True if the optimizer may update the weights; the same on every rank. Called before the update."""
        loss, norm = self._loss, self._max_over_ranks(norm)
        has_gradients = math.isfinite(loss)  # otherwise they were discarded before the norm was computed
        self.last_checked, self._problem = (loss, norm if has_gradients else math.nan), self.problem(loss, norm)
        return self._problem is None

    def _max_over_ranks(self, value: float) -> float:
        """Reduce ``value`` to the maximum over all ranks; infinity if any is not finite. Collective."""
        group, device = self.trainer.world.decision_group
        values = torch.tensor([value if math.isfinite(value) else math.inf], dtype=torch.float64, device=device)
        return all_reduce(values, group, dist.ReduceOp.MAX).item()

    def problem(self, loss: float, norm: float) -> str | None:
        """Describe the problem with a step that has this loss and gradient norm, or return None if it is normal."""
        return self.losses.problem("loss", loss) or self.norms.problem("gradient norm", norm)

    def on_after_update(self, result: StepResult) -> None:
        """Set ``result.problem``, and update the statistics.

        A rejected step gets the loss and norm agreed on by all ranks, because this rank's values may be finite.
        """
        if result.is_overflow:
            return
        if self.settings.is_guarded:
            (loss, norm), result.problem = self.last_checked, self._problem
        else:
            loss, norm = result.loss, result.grad_norm
            result.problem = self.problem(loss, norm)
        if result.is_rejected:
            self.history.streak += 1
            result.loss, result.grad_norm = loss, norm
        else:
            self.losses.add(loss)
            self.norms.add(norm)
            self.history.streak, self.history.good_step = 0, self.trainer.samples.step

    # Reactions to an anomalous step: a log line and a record, the end of the run, or a rollback.

    def on_step_end(self, result: StepResult) -> None:
        """React to an anomalous step. Collective.

        Raises:
            NumericsError: too many consecutive anomalous steps, and no rollback is possible; the same on every rank.
        """
        if self._checkpointer is not None:
            self._checkpointer.is_held = self.settings.rolls_back and self.history.streak > 0
        if result.problem is not None:
            self._handle_anomaly(result, result.problem)

    def _handle_anomaly(self, result: StepResult, reason: str) -> None:
        """Log an anomalous step. If it was skipped, record it; after too many in a row, roll back or end the run."""
        samples = self.trainer.samples
        event = "skipped" if result.is_rejected else "spike"
        self.trainer.print_line(f"step {samples.step} | {event}: {reason} | {samples.text}")
        if not result.is_rejected:
            return
        position = {"step": samples.step, "first_sample": samples.first, "last_sample": samples.last}
        values = dict(zip(("loss", "grad_norm"), self.last_checked, strict=True))  # orjson writes null if not finite
        self._record({"event": "skipped", **position, **values, "reason": reason})
        if self.history.streak < self.settings.stability_patience:
            return
        if not self.settings.rolls_back:
            raise self._patience_error(reason)
        self._roll_back(reason)

    def _roll_back(self, reason: str) -> None:
        """Roll back to the last good checkpoint and continue after this step's samples. Collective."""
        trainer, samples, old_history = self.trainer, self.trainer.samples, self.history
        if self._checkpointer is None:
            raise self._patience_error(reason, " There is no checkpoint to roll back to.")
        tokens_dropped = trainer.progress.tokens_dropped  # of all samples up to the last one
        self.load_state_dict({})  # the default for a checkpoint without a state of the guard
        try:
            checkpoint = self._checkpointer.roll_back(up_to_step=old_history.good_step)
        except CheckpointError as error:
            self.history = old_history
            raise self._patience_error(reason, f" There is no checkpoint to roll back to: {error}") from error
        first, step = trainer.progress.samples_consumed, trainer.progress.step
        trainer.progress.samples_consumed = samples.last + 1
        trainer.progress.samples_skipped += samples.last + 1 - first  # the learning rate continues from the checkpoint
        trainer.progress.tokens_dropped_skipped += tokens_dropped - trainer.progress.tokens_dropped
        trainer.progress.tokens_dropped = tokens_dropped
        self._restore_counters(step, old_history)
        if self.history.returns > MAX_ROLLBACKS:
            note = f" The run has already rolled back to {checkpoint} {MAX_ROLLBACKS} times without success."
            raise self._patience_error(reason, note)
        skipped = {"first_sample": first, "last_sample": samples.last}
        self._record({"event": "went back", "step": samples.step, "to_step": step, "bad_steps": old_history.streak,
                      **skipped, "checkpoint": checkpoint.name, "reason": reason})  # fmt: skip
        trainer.print_line(
            f"step {samples.step} | {old_history.streak} consecutive anomalous steps: rolled back to {checkpoint}, "
            f"step {step}; {range_text(first, samples.last)} skipped"
        )

    def _restore_counters(self, step: int, old_history: History) -> None:
        """Restore the counters that the checkpoint cannot contain: journal records and rollbacks."""
        history = self.history
        history.events = old_history.events
        history.returns = old_history.returns + 1 if old_history.returned_to == step else 1
        history.returned_to = step
        history.streak, history.good_step = 0, step

    def _record(self, record: dict[str, Any]) -> None:
        """Append a numbered record to the journal; only rank 0 has one."""
        self.history.events += 1
        if self._journal is not None:
            self._journal.add({"number": self.history.events, **record})

    def _patience_error(self, reason: str, details: str = "") -> NumericsError:
        samples, settings = self.trainer.samples, self.settings
        hint = "" if settings.rolls_back else " --stability-guard rollback returns to a checkpoint instead."
        error = NumericsError(
            f"fewer than --stability-patience {settings.stability_patience} consecutive steps may be anomalous, got "
            f"that many up to step {samples.step} ({samples.text}): {reason}.{details} "
            f"{self.trainer.folder / JOURNAL_NAME} lists them; their updates were skipped. Inspect their samples, "
            f"lower --lr, or load an older checkpoint.{hint}"
        )
        error.is_of_this_rank = False
        return error

    # Location of a non-finite value that ends the run.

    def find_nonfinite(self, error: NumericsError) -> str | None:
        """Describe this rank's non-finite losses or gradients. Synchronises with the device."""
        find = describe_nonfinite_losses if isinstance(error, LossError) else describe_nonfinite_gradients
        return find(self.trainer.engine, self.trainer.world.grid, self.trainer.samples)

    # Checkpoint state.

    def state_dict(self) -> dict[str, Any]:
        return {"losses": list(self.losses.values), "norms": list(self.norms.values), **vars(self.history)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        settings, remaining = self.settings, dict(state)
        self.losses = RunningStatistics(
            settings.stability_window, settings.stability_sigma, remaining.pop("losses", ())
        )
        self.norms = RunningStatistics(settings.stability_window, settings.stability_sigma, remaining.pop("norms", ()))
        self.history = History(**remaining)
