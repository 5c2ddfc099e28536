"""StepPolicy: loss scale, overflow, veto and clipping of a step."""

from __future__ import annotations

import math
from collections.abc import Callable

from megatron.errors import NumericsError
from megatron.optim.grad_scaler import GradScaler
from tds.grad_norm import clip_coefficient


class StepPolicy:
    """Decides whether the weights are updated and by which factor gradients are clipped.

    Args:
        scaler: the loss scale.
        clip_grad: largest gradient norm; 0 disables clipping.

    Attributes:
        accepts_step: called with the gradient norm before each update, unless fp16 gradients have overflowed. False
            rejects the step, and the weights do not change. It must return the same value on every rank. If None, a
            norm that is not finite raises an error.
    """

    def __init__(self, scaler: GradScaler, clip_grad: float = 0.0) -> None:
        self.scaler = scaler
        self.clip_grad = clip_grad
        self.accepts_step: Callable[[float], bool] | None = None

    def has_overflowed(self, norm: float) -> bool:
        """Return True if ``norm`` is not finite and a smaller loss scale could prevent that."""
        return not math.isfinite(norm) and self.scaler.can_decrease

    def rejects(self, norm: float) -> bool:
        """Return True if ``accepts_step`` vetoes a step with this gradient norm.

        Raises:
            NumericsError: the norm is not finite and ``accepts_step`` is None.
        """
        if self.accepts_step is not None:
            return not self.accepts_step(norm)
        if not math.isfinite(norm):
            raise NumericsError(self.nonfinite_message(norm))
        return False

    def clip_factor(self, norm: float) -> float:
        """Return the factor that reduces gradients of this norm to at most ``clip_grad``."""
        return clip_coefficient(norm, self.clip_grad)

    def nonfinite_message(self, norm: float) -> str:
        """Return the error message for a non-finite norm that no smaller loss scale can prevent."""
        if self.scaler.is_dynamic:
            return (
                f"overflow at the smallest loss scale ({self.scaler.scale:g}); the gradients themselves are not "
                "finite. The step did not change the weights. Lower --lr or use bf16."
            )
        if self.scaler.is_fixed:
            return (
                f"fp16 gradients must not overflow at the fixed --loss-scale {self.scaler.scale:g}, got the norm "
                f"{norm}. The step did not change the weights. Lower --loss-scale, or omit it: a dynamic loss scale "
                "skips such steps and is halved. If they overflow at any scale, lower --lr or use bf16."
            )
        return (
            f"the gradient norm must be finite, got {norm}. The step did not change the weights. "
            "Lower --lr, or inspect the batch."
        )
