"""What a time may be of another: the bars of the benchmark of checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.data_parts.rounds import quartiles


@dataclass(frozen=True)
class Ceiling:
    """A ratio that must not be passed, and what was found: quartiles over rounds."""

    name: str
    at_most: float
    quartiles: tuple[float, float, float]

    @classmethod
    def of(cls, name: str, at_most: float, ours: Sequence[float], theirs: Sequence[float]) -> Ceiling:
        """Return the bar for ``ours`` over ``theirs``, divided round by round."""
        return cls(name, at_most, quartiles([a / b for a, b in zip(ours, theirs, strict=True)]))

    @property
    def is_met(self) -> bool:
        """Whether the median stays below it."""
        return self.quartiles[1] <= self.at_most

    @property
    def text(self) -> str:
        low, middle, high = self.quartiles
        verdict = "met" if self.is_met else "NOT MET"
        return f"{self.name:58}{middle:9.5f} (quartiles {low:.5f}, {high:.5f})  at most {self.at_most:g}: {verdict}"


def bars_of(seconds: dict[str, list[float]], interval_s: float) -> list[Ceiling]:
    """Return the bars of one team from the seconds of its rounds.

    Args:
        interval_s: between two saves of a run that says nothing about them.
    """
    flushed, save, stall = seconds["torch.save + fsync"], seconds["save"], seconds["stall of an async save"]
    return [
        Ceiling.of("save / (torch.save + fsync)", 1.3, save, flushed),
        Ceiling.of("stall of an async save / (torch.save + fsync)", 0.45, stall, flushed),
        Ceiling.of("verification / save", 0.25, seconds["verification"], save),
        Ceiling.of(f"stall / {interval_s / 60:g} minutes", 0.01, stall, [interval_s] * len(stall)),
    ]
