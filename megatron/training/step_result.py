"""StepResult; the errors of a step whose loss is not finite."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from megatron.errors import NumericsError
from megatron.models.common.router import ExpertLoad
from megatron.optim import MixedPrecisionOptimizer


@dataclass
class StepResult:
    """What one optimizer step gave, the same on every rank.

    ``is_skipped``: the weights are as before. ``is_refused``: because the stability guard rejected the step, and not
    because fp16 gradients overflowed. ``problem``: what the guard found wrong with the step, in words. ``expert_load``:
    of a model with experts.
    """

    loss: float
    grad_norm: float
    loss_scale: float
    is_skipped: bool
    losses: dict[str, float] = field(default_factory=dict)
    is_refused: bool = False
    problem: str | None = None
    expert_load: ExpertLoad | None = None

    @property
    def is_bad(self) -> bool:
        """Whether the guard found something wrong with the step."""
        return self.problem is not None

    @property
    def is_overflow(self) -> bool:
        """True where fp16 has overflowed and a smaller loss scale may cure that."""
        return self.is_skipped and not self.is_refused


class LossError(NumericsError):
    """The loss, and not only a gradient, is not finite."""


class ModuleError(NumericsError):
    """A number that is not finite, with the module that made it.

    ``found`` says so in words; "" where another rank holds the module.
    """

    def __init__(self, text: str, found: str) -> None:
        super().__init__(text)
        self.found = found


class FiniteLossCheck:
    """Raises an error if the loss or the gradient norm of a step is not finite; the default ``policy.accepts_step``.

    It raises in the update, after the collectives of the step: a rank that raised earlier would leave the other ranks
    waiting.
    """

    def __init__(self, optimizer: MixedPrecisionOptimizer) -> None:
        self._optimizer = optimizer
        self._loss = 0.0
        optimizer.policy.accepts_step = self._allows

    def take_loss(self, loss: float) -> None:
        """Note the mean loss of the step, ahead of its update."""
        self._loss = loss

    def _allows(self, norm: float) -> bool:
        if not math.isfinite(self._loss):
            raise LossError(self._not_finite_text())
        if not math.isfinite(norm):
            raise NumericsError(self._optimizer.policy.not_finite_text(norm))
        return True

    def _not_finite_text(self) -> str:
        gathers = " If it is so from the first step on, weights are read outside of the forward of a module that has "
        gathers += "them, which --zero-stage 3 gathers them for: use --zero-stage 2."
        return (
            f"the loss must be finite, got {self._loss}. The weights are as before this step. Lower --lr, look at "
            "the samples, or leave such steps out with --stability-guard skip."
            + (gathers if self._optimizer.store.gathers_weights else "")
        )


def result_of(loss: float, losses: dict[str, float], scale: float, optimizer: MixedPrecisionOptimizer) -> StepResult:
    """Return what the step gave that ``optimizer`` has just taken or skipped, with the loss scale it ran with."""
    has_gradients = math.isfinite(loss) or not optimizer.was_refused  # else they were thrown away ahead of the norm
    return StepResult(
        loss=loss,
        grad_norm=optimizer.grad_norm if has_gradients else math.nan,
        loss_scale=scale,
        is_skipped=optimizer.overflow or optimizer.was_refused,
        losses=losses,
        is_refused=optimizer.was_refused,
    )
