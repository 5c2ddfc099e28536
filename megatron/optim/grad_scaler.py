"""GradScaler: the loss scale that keeps fp16 gradients from underflowing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass
class GradScaler:
    """A loss scale that doubles after ``window`` steps without overflow and halves after ``hysteresis`` overflows.

    Each further overflow halves the scale again. A window without overflow restores the full hysteresis; halving does
    not. This is the rule of DeepSpeed (``consecutive_hysteresis`` false) and Megatron.

    Args:
        scale: the initial factor on the loss, a power of two.
        is_dynamic: adapt the scale; otherwise it is fixed.
        window: steps without overflow before the scale doubles.
        hysteresis: overflows before the scale halves.
        floor: smallest scale. At this scale a norm that is not finite does not count as an overflow, because the scale
            cannot decrease further.

    Source: Micikevicius et al. 2018, "Mixed precision training", section 3.2.
    """

    scale: float = 1.0
    is_dynamic: bool = False
    window: int = 1000
    hysteresis: int = 2
    floor: float = 1.0
    good_steps: int = 0
    overflows_left: int = 0

    def __post_init__(self) -> None:
        self.overflows_left = self.overflows_left or self.hysteresis
        self._initial_scale = self.scale

    @property
    def is_fixed(self) -> bool:
        """True if the loss is scaled by a constant other than 1."""
        return not self.is_dynamic and self.scale != 1.0

    @property
    def can_decrease(self) -> bool:
        """True if the scale can still decrease, so that a smaller scale may prevent an overflow."""
        return self.is_dynamic and self.scale > self.floor

    def update(self, has_overflow: bool) -> None:
        """Update the scale after a step."""
        if self.is_dynamic:
            self._adapt(has_overflow)

    def _adapt(self, has_overflow: bool) -> None:
        if has_overflow:
            self.good_steps = 0
            if self.overflows_left > 1:
                self.overflows_left -= 1
            else:
                self.scale = max(self.scale / 2.0, self.floor)
            return
        self.good_steps += 1
        if self.good_steps % self.window == 0:
            self.scale *= 2.0
            self.overflows_left = self.hysteresis

    def state(self) -> dict[str, float]:
        """Return the state for a checkpoint, in types that JSON supports."""
        return {
            "scale": self.scale, "good_steps": self.good_steps, "overflows_left": self.overflows_left,
            "is_dynamic": self.is_dynamic, "hysteresis": self.hysteresis,
        }  # fmt: skip

    def load(self, state: Mapping[str, float]) -> None:
        """Resume from ``state`` if this scaler and the saved one are dynamic; restart from the initial scale otherwise.

        ``window``, ``hysteresis`` and ``floor`` remain as configured. A saved scale below ``floor`` is raised to
        ``floor``. Overflows that were counted before saving still count towards the configured ``hysteresis``.

        Args:
            state: return value of ``state``. A state without ``is_dynamic`` is ignored.
        """
        self.scale, self.good_steps, self.overflows_left = self._initial_scale, 0, self.hysteresis
        if not (self.is_dynamic and state.get("is_dynamic")):
            return
        self.scale = max(float(state["scale"]), self.floor)
        self.good_steps = int(state["good_steps"])
        num_overflows = int(state.get("hysteresis", self.hysteresis)) - int(state["overflows_left"])
        self.overflows_left = max(self.hysteresis - num_overflows, 1)
