"""Running statistics of a value, and the threshold above which a new value is anomalous."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable

MIN_SPREAD = 1.0e-3  # relative to the mean: if values hardly differ, a small change is not an anomaly


class RunningStatistics:
    """The last ``window`` values. A new value is anomalous if it is ``sigma`` standard deviations above their mean.

    The standard deviation is at least ``MIN_SPREAD`` times the mean. At least half of the window must be filled. Sums
    are exact, so that all ranks, and a resumed run, decide identically from the same values.
    """

    def __init__(self, window: int, sigma: float, values: Iterable[float] = ()) -> None:
        self.values: deque[float] = deque(values, maxlen=window)
        self.window, self.sigma = window, sigma

    def add(self, value: float) -> None:
        """Append ``value``, dropping the oldest one if the window is full; ignore it if it is not finite."""
        if math.isfinite(value):
            self.values.append(value)

    def mean(self) -> float:
        """Return the mean, or infinity if less than half of the window is filled."""
        return math.fsum(self.values) / len(self.values) if 2 * len(self.values) >= self.window else math.inf

    def limit(self) -> float:
        """Return the largest normal value; infinity if less than half of the window is filled."""
        mean = self.mean()
        spread = math.sqrt(math.fsum((value - mean) ** 2 for value in self.values) / max(len(self.values), 1))
        return mean + self.sigma * max(spread, MIN_SPREAD * abs(mean))

    def problem(self, name: str, value: float) -> str | None:
        """Describe the problem with a new ``value``, or return None if it is normal."""
        if not math.isfinite(value):
            return f"the {name} is not finite"
        limit = self.limit()
        if value <= limit:
            return None
        return (
            f"the {name} {value:.4g} is above {limit:.4g}, {self.sigma:g} standard deviations above the mean of the "
            f"last {len(self.values)} values"
        )
