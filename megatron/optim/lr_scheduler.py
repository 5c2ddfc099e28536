"""Learning rate by updates."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from megatron.optim.optimizer import MixedPrecisionOptimizer

# The learning rate as a function of how many updates have been made.


@dataclass(frozen=True)
class LRScheduler:
    """Warm-up from 0 to ``lr``, then a decay that reaches ``min_lr`` at the last update, then ``min_lr``.

    | style | after the warm-up of W updates; u from 0 to 1, n the number of the update from 1 |
    |---|---|
    | constant | lr |
    | linear | lr + (min_lr - lr) u |
    | cosine | min_lr + (lr - min_lr) (1 + cos(pi u)) / 2 |
    | exponential | lr (min_lr / lr)^u |
    | wsd | lr, and linear to min_lr in the last ``wsd_decay_fraction`` of the updates |
    | inverse-square-root | lr sqrt(W / n), never below ``min_lr``; without a warm-up W is 1 |

    The last style has no end: it goes on beyond ``decay_updates``, which gives W alone. T5 trains with
    ``1 / sqrt(max(n, k))``, k = 10,000: that is this curve with W = k and ``lr = 1 / sqrt(k)`` (``--lr 0.01
    --lr-decay-iters 1000000 --warmup 0.01``) from update k on; up to there T5 stays at lr and this one rises to it.

    Args:
        decay_updates: updates from the first to the one that reaches ``min_lr``, the warm-up included.
        warmup: fraction of ``decay_updates``.

    Raises:
        ValueError: an unknown style, or exponential decay to 0.

    Source of the last style: Raffel et al. 2020, "Exploring the limits of transfer learning", section 3.1.2.
    """

    lr: float
    min_lr: float = 0.0
    style: str = "linear"
    decay_updates: int = 1
    warmup: float = 0.0
    wsd_decay_fraction: float = 0.1

    def __post_init__(self) -> None:
        if self.style not in STYLES:
            raise ValueError(f"--lr-decay-style must be one of {', '.join(STYLES)}, got {self.style}")
        if self.style == "exponential" and self.min_lr <= 0.0:
            raise ValueError(
                f"--lr-decay-style exponential needs --min-lr above 0, got {self.min_lr}: the curve never reaches 0. "
                "Give a --min-lr or use cosine."
            )

    @property
    def warmup_updates(self) -> int:
        return int(self.warmup * self.decay_updates)

    def at(self, update: int) -> float:
        """Return the rate of update number ``update``, counted from 0."""
        if update < self.warmup_updates:
            return self.lr * (update + 1) / self.warmup_updates
        if self.style == INVERSE_SQUARE_ROOT:
            return max(self.min_lr, self.lr * math.sqrt(max(self.warmup_updates, 1) / (update + 1)))
        left = self.decay_updates - self.warmup_updates
        progress = min(1.0, (update + 1 - self.warmup_updates) / left) if left > 0 else 1.0
        return _DECAYS[self.style](self, progress)


def _linear(rate: LRScheduler, u: float) -> float:
    return rate.lr + (rate.min_lr - rate.lr) * u


def _cosine(rate: LRScheduler, u: float) -> float:
    return rate.min_lr + (rate.lr - rate.min_lr) * (1.0 + math.cos(math.pi * u)) / 2.0


def _exponential(rate: LRScheduler, u: float) -> float:
    return rate.lr * (rate.min_lr / rate.lr) ** u


def _wsd(rate: LRScheduler, u: float) -> float:
    start = 1.0 - rate.wsd_decay_fraction
    return rate.lr if u <= start else _linear(rate, (u - start) / rate.wsd_decay_fraction)


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
    """Give all parameter groups the rate of the coming step."""
    for group in optimizer.param_groups:
        group["lr"] = lr
