"""WeightDecaySchedule: the weight decay as a function of the number of updates or samples."""

from __future__ import annotations

import math
from dataclasses import dataclass

from megatron.optim.optimizer import MixedPrecisionOptimizer


@dataclass(frozen=True)
class WeightDecaySchedule:
    """Weight decay that changes from ``start`` to ``end`` over the run; after ``length`` it stays at ``end``.

    | style | decay after n of N updates |
    |---|---|
    | linear | start + (end - start) n / N |
    | cosine | start + (end - start) (1 - cos(pi n / N)) / 2 |

    Args:
        length: N, in the unit of the learning-rate schedule: updates or samples.

    Raises:
        ValueError: an unknown style.

    Source: Megatron-LM, core/optimizer_param_scheduler.py, ``get_wd``.
    """

    start: float
    end: float
    style: str
    length: float

    def __post_init__(self) -> None:
        if self.style not in ("linear", "cosine"):
            raise ValueError(f"--weight-decay-incr-style must be linear or cosine for a schedule, got {self.style}")

    def after(self, completed: float) -> float:
        """Return the weight decay at the position ``completed``, as ``LRScheduler.position`` counts it."""
        if completed >= self.length:
            return self.end
        progress = completed / self.length
        if self.style == "cosine":
            progress = (1.0 + math.cos(math.pi * (1.0 - progress))) / 2.0
        return self.start + progress * (self.end - self.start)


def set_weight_decay(optimizer: MixedPrecisionOptimizer, weight_decay: float) -> None:
    """Set the weight decay of the next update in the parameter groups with ``"has_default_decay": True``.

    Groups without decay (biases and norms), and groups whose decay is set by name, are unchanged.
    """
    for group in optimizer.param_groups:
        if group.get("has_default_decay"):
            group["weight_decay"] = weight_decay
