"""Learning rate by updates, or by the samples of updates."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from megatron.optim.optimizer import MixedPrecisionOptimizer


@dataclass(frozen=True)
class LRScheduler:
    """Warm-up from 0 to ``lr``, then a decay that reaches ``min_lr`` at the last update, then ``min_lr``.

    | style | after the warm-up of W updates; u from 0 to 1, n the number of the update from 1 |
    |---|---|
    | constant | lr |
    | linear | lr + (min_lr - lr) u |
    | cosine | min_lr + (lr - min_lr) (1 + cos(pi u)) / 2 |
    | exponential | lr (min_lr / lr)^u |
    | wsd | lr, and to min_lr over the last ``wsd_decay_fraction``, or ``wsd_length`` updates, as ``wsd_style`` says |
    | inverse-square-root | lr sqrt(W / n), never below ``min_lr``; without a warm-up W is 1 |

    ``wsd_style`` gives min_lr + (lr - min_lr) c over them: linear c = 1 - u, cosine c = (1 + cos(pi u)) / 2,
    exponential c = 2 (1/2)^u - 1, minus_sqrt c = 1 - sqrt(u), with u from 0 to 1.

    All lengths may be samples instead of updates; n is then the number of samples after the update. The rate depends
    only on that number, so it does not depend on the batch sizes of earlier updates.

    The last style has no end: it goes on beyond ``decay_updates``, which gives W alone. T5 trains with
    ``1 / sqrt(max(n, k))``, k = 10,000: that is this curve with W = k and ``lr = 1 / sqrt(k)`` (``--lr 0.01
    --lr-decay-iters 1000000 --warmup 0.01``) from update k on; up to there T5 stays at lr and this one rises to it.

    Args:
        decay_updates: updates from the first to the one that reaches ``min_lr``, the warm-up included.
        warmup: fraction of ``decay_updates``; the warm-up need not be a whole number of updates.
        warmup_length: updates of the warm-up; None: the fraction.
        wsd_length: updates of the decay of wsd; None: the fraction of those behind the warm-up.

    Raises:
        ValueError: an unknown style, or exponential decay to 0.

    Source of the styles of wsd: Megatron-LM, optimizer_param_scheduler.py, ``get_lr``. Source of the last style: Raffel
    et al. 2020, "Exploring the limits of transfer learning", section 3.1.2.
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

    def __post_init__(self) -> None:
        if self.style not in STYLES:
            raise ValueError(f"--lr-decay-style must be one of {', '.join(STYLES)}, got {self.style}")
        if self.style == "exponential" and self.min_lr <= 0.0:
            raise ValueError(
                f"--lr-decay-style exponential needs --min-lr above 0, got {self.min_lr}: the curve never reaches 0. "
                "Give a --min-lr or use cosine."
            )

    @property
    def warmup_updates(self) -> float:
        """Length of the warm-up in updates, or in samples if the other lengths are."""
        return self.warmup * self.decay_updates if self.warmup_length is None else self.warmup_length

    @property
    def wsd_share(self) -> float:
        """Share of what follows the warm-up in which wsd decays."""
        if self.wsd_length is None:
            return self.wsd_decay_fraction
        left = self.decay_updates - self.warmup_updates
        return self.wsd_length / left if left > 0 else 1.0

    def at(self, update: int) -> float:
        """Return the rate of update number ``update``, counted from 0, if the lengths are updates."""
        return self.after(update + 1)

    def after(self, done: float) -> float:
        """Return the rate of the update after which ``done`` updates, or samples of updates, are done."""
        if done <= self.warmup_updates:
            return self.lr * done / self.warmup_updates
        if self.style == INVERSE_SQUARE_ROOT:
            return max(self.min_lr, self.lr * math.sqrt(max(self.warmup_updates, 1) / done))
        left = self.decay_updates - self.warmup_updates
        progress = min(1.0, (done - self.warmup_updates) / left) if left > 0 else 1.0
        return _DECAYS[self.style](self, progress)

    def between(self, lr: float, min_lr: float) -> LRScheduler:
        """Return the same course with another peak and another floor."""
        return replace(self, lr=lr, min_lr=min_lr)


def _linear(rate: LRScheduler, u: float) -> float:
    return rate.lr + (rate.min_lr - rate.lr) * u


def _cosine(rate: LRScheduler, u: float) -> float:
    return rate.min_lr + (rate.lr - rate.min_lr) * (1.0 + math.cos(math.pi * u)) / 2.0


def _exponential(rate: LRScheduler, u: float) -> float:
    return rate.lr * (rate.min_lr / rate.lr) ** u


def _wsd(rate: LRScheduler, u: float) -> float:
    start = 1.0 - rate.wsd_share
    if u <= start:
        return rate.lr
    within = (u - start) / rate.wsd_share
    if rate.wsd_style == "linear":
        return _linear(rate, within)
    return rate.min_lr + (rate.lr - rate.min_lr) * _WSD_STYLES[rate.wsd_style](min(within, 1.0))


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
    """Give all parameter groups one rate for the coming step."""
    for group in optimizer.param_groups:
        group["lr"] = lr


def set_learning_rates(optimizer: MixedPrecisionOptimizer, scheduler: LRScheduler, done: float) -> float:
    """Set the rate of each parameter group (``param_rates``) for the coming update; return the rate of --lr.

    Args:
        done: updates, or samples of updates, after the coming update.
    """
    lr = scheduler.after(done)
    for group in optimizer.param_groups:
        group["lr"] = scheduler.between(group["peak_lr"], group["floor_lr"]).after(done) if "peak_lr" in group else lr
    return lr
