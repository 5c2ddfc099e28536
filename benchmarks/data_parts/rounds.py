"""Contenders that take turns, and what their times say: medians over rounds, ratios within them."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

Turn = Callable[[], float]
"""Does one turn and returns what was measured: units of work a second."""


@dataclass(frozen=True)
class Bar:
    """A ratio that must be reached, and what was found: quartiles over rounds.

    Args:
        by_cpu: the median of the same by processor time, where that was taken: it says something on a busy machine too.
    """

    name: str
    at_least: float
    quartiles: tuple[float, float, float]
    by_cpu: float | None = None

    @property
    def is_met(self) -> bool:
        """Whether the median reaches it."""
        return self.quartiles[1] >= self.at_least

    @property
    def text(self) -> str:
        low, middle, high = self.quartiles
        verdict = "met" if self.is_met else "NOT MET"
        cpu = "" if self.by_cpu is None else f", by CPU time {self.by_cpu:.2f}"
        ratio = f"{middle:9.2f} (quartiles {low:.2f}, {high:.2f}{cpu})"
        return f"{self.name:50}{ratio}  at least {self.at_least:g}: {verdict}"


def take_turns(turns: Mapping[str, Turn], rounds: int) -> dict[str, list[float]]:
    """Return the rates of each contender, one for each round; the order rotates from round to round."""
    rates: dict[str, list[float]] = {name: [] for name in turns}
    names = list(turns)
    for number in range(rounds):
        shift = number % len(names)
        for name in names[shift:] + names[:shift]:
            rates[name].append(turns[name]())
    return rates


def ratio_quartiles(ours: Sequence[float], theirs: Sequence[float]) -> tuple[float, float, float]:
    """Return lower quartile, median and upper quartile of how many times as fast ours is, round by round."""
    return quartiles([a / b for a, b in zip(ours, theirs, strict=True)])


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Return lower quartile, median and upper quartile; of one value it is all three."""
    if len(values) < 2:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high
