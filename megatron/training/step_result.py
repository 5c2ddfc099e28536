"""What an optimizer step gave, and the error of one whose loss is not finite."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from megatron.errors import NumericsError
from megatron.optim import MixedPrecisionOptimizer


@dataclass(frozen=True)
class StepResult:
    """What one optimizer step gave, the same on every rank.

    ``is_skipped``: the weights are as before. ``is_refused``: because whoever judges steps said so, not for an overflow
    of fp16.
    """

    loss: float
    grad_norm: float
    loss_scale: float
    is_skipped: bool
    losses: dict[str, float] = field(default_factory=dict)
    is_refused: bool = False

    @property
    def is_overflow(self) -> bool:
        """True where fp16 has overflowed and a smaller loss scale may cure that."""
        return self.is_skipped and not self.is_refused


class LossError(NumericsError):
    """The loss, and not only a gradient, is not finite."""


def raising_unless_finite(optimizer: MixedPrecisionOptimizer) -> Callable[[float], None]:
    """Return what raises LossError for a loss that is not finite where no loss scale can be at fault."""

    def check(loss: float) -> None:
        if not math.isfinite(loss) and not optimizer.scaler.is_dynamic:
            raise LossError(
                f"the loss must be finite, got {loss}. The weights are as before this step. Lower --lr, look at the "
                "samples, or leave such steps out with --stability-guard skip."
            )

    return check


def result_of(loss: float, scale: float, optimizer: MixedPrecisionOptimizer, losses: dict[str, float]) -> StepResult:
    """Return what the step gave that ``optimizer`` has just taken or skipped, with the loss scale it ran with."""
    has_gradients = math.isfinite(loss) or not optimizer.was_refused  # else they were thrown away ahead of the norm
    return StepResult(
        loss=loss,
        grad_norm=optimizer._global_grad_norm if has_gradients else math.nan,
        loss_scale=scale,
        is_skipped=optimizer.overflow or optimizer.was_refused,
        losses=losses,
        is_refused=optimizer.was_refused,
    )
