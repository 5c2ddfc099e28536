"""What one contender told over the rounds, and how contenders compare."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass, field

from benchmarks.pipe.case import Case, Contender

NUM_EQUAL_LOSSES = 3


class UnequalError(RuntimeError):
    """Contenders that do not train the same thing."""


@dataclass
class Record:
    """What one contender told.

    Args:
        seconds: of each turn that counts, a step; of each rank.
        cpu_s: processor time of each turn, a step, over all ranks.
        losses: of each step from the first.
        cut: transformer layers of each piece.
        stage_s: seconds of the layers of each stage for one micro-batch, as measured ahead; of ours.
        first_stage_bytes: tensors on stage 0 before a step, and the most that the step adds.
        measured_to_simulated: for each recorded step of ours.
    """

    contender: Contender
    cut: str = ""
    seconds: list[list[float]] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    stage_s: list[float] = field(default_factory=list)
    first_stage_bytes: tuple[int, int] | None = None
    measured_to_simulated: list[float] = field(default_factory=list)

    def speeds(self, case: Case) -> list[float]:
        """Return tokens a second, turn by turn; of processes side by side the sum."""
        if self.contender.kind == "side by side":
            return [sum(case.tokens / each for each in turn) for turn in self.seconds]
        return [case.tokens / max(turn) for turn in self.seconds]

    def speed(self, case: Case) -> float:
        """Return the median of ``speeds``."""
        return statistics.median(self.speeds(case))


def check_losses(records: Iterable[Record], tolerance: float) -> float:
    """Return the largest difference of losses among the first steps.

    Raises:
        UnequalError: above ``tolerance``.
    """
    records = list(records)
    worst = 0.0
    for step in range(min(NUM_EQUAL_LOSSES, *(len(record.losses) for record in records))):
        by_name = {record.contender.name: record.losses[step] for record in records}
        difference = max(by_name.values()) - min(by_name.values())
        if not (all(map(math.isfinite, by_name.values())) and difference <= tolerance):
            raise UnequalError(
                f"contenders must train the same thing, got losses at step {step} that differ by {difference:.2e}, "
                f"above {tolerance}, or are no numbers: {by_name}"
            )
        worst = max(worst, difference)
    return worst


def ratio(case: Case, ours: Record, theirs: Record) -> float:
    """Return how many times as fast ``ours`` is: the median over the rounds."""
    return statistics.median(a / b for a, b in zip(ours.speeds(case), theirs.speeds(case), strict=True))


def fastest(case: Case, records: Iterable[Record], *kinds: str) -> Record | None:
    """Return the record of those ``kinds`` with the highest median speed."""
    chosen = [record for record in records if record.contender.kind in kinds]
    return max(chosen, key=lambda record: record.speed(case), default=None)
