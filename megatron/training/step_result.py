"""StepResult, and errors for steps with non-finite losses."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from megatron.errors import NumericsError
from megatron.models.common.router import ExpertLoad
from megatron.optim import MixedPrecisionOptimizer


@dataclass
class StepResult:
    """The result of one optimizer step, the same on every rank.

    Args:
        is_skipped: the weights were not updated.
        losses: all losses by name.
        is_rejected: the stability guard rejected the step (as opposed to an fp16 gradient overflow).
        problem: description of the anomaly that the guard has found, or None.
        expert_load: tokens per expert; None for a dense model.
    """

    loss: float
    grad_norm: float
    loss_scale: float
    is_skipped: bool
    losses: dict[str, float] = field(default_factory=dict)
    is_rejected: bool = False
    problem: str | None = None
    expert_load: ExpertLoad | None = None

    @property
    def is_anomalous(self) -> bool:
        """True if the guard has found an anomaly in the step."""
        return self.problem is not None

    @property
    def is_overflow(self) -> bool:
        """True if fp16 gradients overflowed, which a smaller loss scale may avoid."""
        return self.is_skipped and not self.is_rejected


class LossError(NumericsError):
    """The loss is not finite, as opposed to a non-finite gradient of a finite loss."""


class ModuleError(NumericsError):
    """A value is not finite, and the module that produced it is known.

    Args:
        location: description of the module; "" on ranks that do not hold it.
    """

    def __init__(self, text: str, location: str) -> None:
        super().__init__(text)
        self.location = location


class FiniteLossCheck:
    """Raises an error if a step's loss or gradient norm is not finite.

    The check is installed as ``accepts_step`` in the optimizer's policy, where the stability guard may replace it. The
    error is raised in the update, after all collectives in the step. An earlier error would make other ranks hang.
    """

    def __init__(self, optimizer: MixedPrecisionOptimizer) -> None:
        self._optimizer = optimizer
        self._loss = 0.0
        optimizer.policy.accepts_step = self._accepts_step

    def record_loss(self, loss: float) -> None:
        """Store the step's mean loss before the update."""
        self._loss = loss

    def _accepts_step(self, norm: float) -> bool:
        """Return True if loss and gradient norm are finite, otherwise raise."""
        if not math.isfinite(self._loss):
            raise LossError(self._not_finite_text())
        if not math.isfinite(norm):
            raise NumericsError(self._optimizer.policy.nonfinite_message(norm))
        return True

    def _not_finite_text(self) -> str:
        hint = " If this happens from the first step on, weights are read outside of the forward of their module, for "
        hint += "which --zero-stage 3 gathers them: use --zero-stage 2."
        return (
            f"the loss must be finite, got {self._loss}. The step did not change the weights. Lower --lr, inspect "
            "the samples, or skip such steps with --stability-guard skip."
            + (hint if self._optimizer.store.gathers_weights else "")
        )


def make_step_result(
    loss: float, losses: dict[str, float], scale: float, optimizer: MixedPrecisionOptimizer
) -> StepResult:
    """Describe the step that ``optimizer`` has just taken or skipped with loss scale ``scale``."""
    # If a step is rejected for its loss, the gradients have been discarded before their norm was computed.
    has_gradients = math.isfinite(loss) or not optimizer.was_rejected
    return StepResult(
        loss=loss,
        grad_norm=optimizer.grad_norm if has_gradients else math.nan,
        loss_scale=scale,
        is_skipped=optimizer.overflow or optimizer.was_rejected,
        losses=losses,
        is_rejected=optimizer.was_rejected,
    )
