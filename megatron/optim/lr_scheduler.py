"""LRScheduler: the learning rate as a function of the number of updates or samples."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from megatron.optim.optimizer import MixedPrecisionOptimizer


@dataclass(frozen=True)
class LRScheduler:
    """Warm-up from ``warmup_init`` to ``lr``, then a decay that reaches ``min_lr`` at the last update, then ``min_lr``.

    | style | rate after the warm-up of W updates; u rises from 0 to 1, n counts updates from 1 |
    |---|---|
    | constant | lr |
    | linear | lr + (min_lr - lr) u |
    | cosine | min_lr + (lr - min_lr) (1 + cos(pi u)) / 2 |
    | exponential | lr (min_lr / lr)^u |
    | wsd | lr, then over the last ``wsd_decay_fraction`` or ``wsd_length`` updates to min_lr, by ``wsd_style`` |
    | inverse-square-root | lr sqrt(W / n), never below ``min_lr``; without a warm-up W is 1 |

    During the decay of wsd, in which u rises from 0 to 1, the rate is min_lr + (lr - min_lr) c. ``wsd_style`` selects
    c: linear 1 - u, cosine (1 + cos(pi u)) / 2, exponential 2 (1/2)^u - 1, minus_sqrt 1 - sqrt(u).

    All lengths may be samples instead of updates; n is then the number of samples after the update. The rate depends
    only on that number and not on the batch sizes of earlier updates.

    inverse-square-root has no end: it continues after ``decay_updates``, which only determines W. T5 trains with
    ``1 / sqrt(max(n, k))``, k = 10,000. From update k on, this is the same curve with W = k and ``lr = 1 / sqrt(k)``
    (``--lr 0.01 --lr-decay-iters 1000000 --warmup 0.01``). Before update k, T5 stays at lr, while this curve rises to
    it.

    Args:
        decay_updates: updates from the first to the one that reaches ``min_lr``, the warm-up included.
        warmup: fraction of ``decay_updates``; the warm-up need not be a whole number of updates.
        warmup_length: number of warm-up updates; None: ``warmup`` determines it.
        warmup_init: rate at the start of the warm-up, for all parameters.
        wsd_length: number of updates in the decay of wsd; None: ``wsd_decay_fraction`` of the updates after the
            warm-up.
        step_offset: 0: an update uses the rate at the position after it; -1: the rate at the position before it, as in
            Megatron-LM.

    Raises:
        ValueError: an unknown style, or exponential decay to 0.

    Source of ``wsd_style``: Megatron-LM, optimizer_param_scheduler.py, ``get_lr``. Source of inverse-square-root:
    Raffel et al. 2020, "Exploring the limits of transfer learning", section 3.1.2.
    """

    lr: float
    min_lr: float = 0.0
    style: str = "linear"
    decay_updates: float = 1
    warmup: float = 0.0
    wsd_decay_fraction: float = 0.1
    warmup_length: float | None = None
    wsd_length: float | None = None
    wsd_style: str = "linear"
    step_offset: int = 0
    warmup_init: float = 0.0

    def __post_init__(self) -> None:
        if self.style not in STYLES:
            raise ValueError(f"--lr-decay-style must be one of {', '.join(STYLES)}, got {self.style}")
        if self.style == "exponential" and self.min_lr <= 0.0:
            raise ValueError(
                f"--lr-decay-style exponential needs --min-lr above 0, got {self.min_lr}: the curve never reaches 0. "
                "Set --min-lr or use cosine."
            )

    @property
    def warmup_updates(self) -> float:
        """Length of the warm-up, in updates, or in samples if the other lengths are samples."""
        return self.warmup * self.decay_updates if self.warmup_length is None else self.warmup_length

    @property
    def wsd_fraction(self) -> float:
        """Fraction of post-warm-up updates in which wsd decays."""
        if self.wsd_length is None:
            return self.wsd_decay_fraction
        remaining = self.decay_updates - self.warmup_updates
        return self.wsd_length / remaining if remaining > 0 else 1.0

    def position(self, completed: float, step_length: float) -> float:
        """Return the argument of ``after`` for an update.

        Args:
            completed: total number of updates before this update, or of samples if the lengths are samples.
            step_length: 1, or the number of samples of this update.
        """
        return completed + (1 + self.step_offset) * step_length

    def at(self, update: int) -> float:
        """Return the learning rate of update ``update``, counted from 0; valid if the lengths are updates."""
        return self.after(self.position(update, 1))

    def after(self, completed: float) -> float:
        """Return the learning rate at a position of the schedule.

        Args:
            completed: total number of updates, or of samples if the lengths are samples; see ``position``.
        """
        if 0 < self.warmup_updates >= completed:
            return self.warmup_init + (self.lr - self.warmup_init) * completed / self.warmup_updates
        if self.style == INVERSE_SQUARE_ROOT:
            return max(self.min_lr, self.lr * math.sqrt(max(self.warmup_updates, 1) / max(completed, 1)))
        remaining = self.decay_updates - self.warmup_updates
        progress = min(1.0, (completed - self.warmup_updates) / remaining) if remaining > 0 else 1.0
        return _DECAYS[self.style](self, progress)

    def with_rates(self, lr: float, min_lr: float) -> LRScheduler:
        """Copy the schedule with peak ``lr`` and floor ``min_lr``."""
        return replace(self, lr=lr, min_lr=min_lr)


def _linear(scheduler: LRScheduler, u: float) -> float:
    return scheduler.lr + (scheduler.min_lr - scheduler.lr) * u


def _cosine(scheduler: LRScheduler, u: float) -> float:
    return scheduler.min_lr + (scheduler.lr - scheduler.min_lr) * (1.0 + math.cos(math.pi * u)) / 2.0


def _exponential(scheduler: LRScheduler, u: float) -> float:
    return scheduler.lr * (scheduler.min_lr / scheduler.lr) ** u


def _wsd(scheduler: LRScheduler, u: float) -> float:
    start = 1.0 - scheduler.wsd_fraction
    if u <= start:
        return scheduler.lr
    decay_progress = (u - start) / scheduler.wsd_fraction
    if scheduler.wsd_style == "linear":
        return _linear(scheduler, decay_progress)
    return scheduler.min_lr + (scheduler.lr - scheduler.min_lr) * _WSD_STYLES[scheduler.wsd_style](
        min(decay_progress, 1.0)
    )


_WSD_STYLES: dict[str, Callable[[float], float]] = {
    "cosine": lambda u: (math.cos(math.pi * u) + 1.0) / 2.0,
    "exponential": lambda u: 2.0 * 0.5**u - 1.0,
    "minus_sqrt": lambda u: 1.0 - math.sqrt(u),
}


_DECAYS: dict[str, Callable[[LRScheduler, float], float]] = {
    "constant": lambda rate, u: rate.lr,
    "linear": _linear,
    "cosine": _cosine,
    "exponential": _exponential,
    "wsd": _wsd,
}

INVERSE_SQUARE_ROOT = "inverse-square-root"
STYLES = (*_DECAYS, INVERSE_SQUARE_ROOT)


def set_learning_rate(optimizer: MixedPrecisionOptimizer, lr: float) -> None:
    """Set the same rate in all parameter groups for the next step."""
    for group in optimizer.param_groups:
        group["lr"] = lr


def set_learning_rates(optimizer: MixedPrecisionOptimizer, scheduler: LRScheduler, completed: float) -> float:
    """Set each parameter group's rate (``param_rates``) for the next update; return the rate of --lr.

    Args:
        completed: position of the next update, from ``scheduler.position``.
    """
    lr = scheduler.after(completed)
    for group in optimizer.param_groups:
        group["lr"] = (
            scheduler.with_rates(group["peak_lr"], group["floor_lr"]).after(completed) if "peak_lr" in group else lr
        )
    return lr
