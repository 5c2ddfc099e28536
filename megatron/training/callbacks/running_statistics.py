"""Running statistics of a value, and the threshold above which a new value is anomalous."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable

SMALLEST_SPREAD = 1.0e-3  # of the mean: values that hardly differ make no small step a jump


class RunningStatistics:
    """The last ``size`` values; a new one is far above them where it is more than ``sigma`` deviations above the mean.

    The deviation counts as at least ``SMALLEST_SPREAD`` of the mean. Half of the values must be there to judge by.
    Sums are exact, so that all ranks, and a run that goes on, judge alike by the same values.
    """

    def __init__(self, size: int, sigma: float, values: Iterable[float] = ()) -> None:
        self.values: deque[float] = deque(values, maxlen=size)
        self.size, self.sigma = size, sigma

    def add(self, value: float) -> None:
        """Let ``value`` take the place of the oldest; one that is not finite is left out."""
        if math.isfinite(value):
            self.values.append(value)

    def mean(self) -> float:
        """Return the mean; infinite while there are too few to judge by."""
        return math.fsum(self.values) / len(self.values) if 2 * len(self.values) >= self.size else math.inf

    def limit(self) -> float:
        """Return from where on a value is far above; infinite while there are too few to judge by."""
        mean = self.mean()
        spread = math.sqrt(math.fsum((value - mean) ** 2 for value in self.values) / max(len(self.values), 1))
        return mean + self.sigma * max(spread, SMALLEST_SPREAD * abs(mean))

    def problem(self, name: str, value: float) -> str | None:
        """Return what is wrong with a new ``value``, in words, or None."""
        if not math.isfinite(value):
            return f"the {name} is not finite"
        limit = self.limit()
        if value <= limit:
            return None
        return (
            f"the {name} {value:.4g} is above {limit:.4g}, {self.sigma:g} deviations above the last {len(self.values)}"
        )
