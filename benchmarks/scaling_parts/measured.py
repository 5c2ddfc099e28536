"""Strong and weak scaling on this machine: the same small GPT-2 on 1, 2 and 4 ranks, each with one thread.

Strong: the samples of a step stay the same. Weak: each rank has as many as the one rank had; with stages and tensor
ranks, which share the work of a sample, more samples in a step stand for that.

The efficiency of n ranks is tokens/s over n times those of one rank; n counts at most as many as there are cores, for
ranks beyond them only share. Beside it stands what the estimate with the calibrated machine gives for the same ratio,
and the bubble by the closed form.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.plan_cases import PIPE, TENSOR, Case

SAMPLES, MICRO_BATCH = 32, 4


@dataclass(frozen=True)
class Point:
    """One layout of one of the two series: ``samples`` of a step, in micro-batches of ``MICRO_BATCH``."""

    series: str
    ranks: int
    flags: str
    replicas: int
    samples: int

    @property
    def case(self) -> Case:
        """The training: of the last flag of a name the last one counts."""
        number = self.samples // (self.replicas * MICRO_BATCH)
        return Case("gpt2", self.ranks, f"{self.flags} --batch-size {MICRO_BATCH} --gas {number}".strip())

    @property
    def name(self) -> str:
        tensor = 2 if TENSOR in self.flags else 1
        pipe = 2 if PIPE in self.flags else 1
        return f"tensor {tensor}, stages {pipe}, replicas {self.replicas}"


def points(most: int) -> list[Point]:
    """Return the layouts of both series on up to ``most`` ranks; the first is one rank."""
    layouts = [(1, "", 1), (2, TENSOR, 1), (2, PIPE, 1), (2, "", 2)]
    layouts += [(4, f"{TENSOR} {PIPE}", 1), (4, PIPE, 2), (4, TENSOR, 2), (4, "", 4)]
    found = [Point("strong", *layout, SAMPLES) for layout in layouts if layout[0] <= most]
    return found + [Point("weak", *layout, SAMPLES * layout[0]) for layout in layouts if 1 < layout[0] <= most]


@dataclass(frozen=True)
class Scaled:
    """A point as measured and as estimated; ``cores`` of the machine."""

    point: Point
    step_s: float
    estimated_s: float
    bubble: float
    tokens: int
    cores: int

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.step_s

    def efficiency(self, one: Scaled) -> float:
        """Return the share of what so many times the one rank would do."""
        return self.tokens_per_s / one.tokens_per_s / min(self.point.ranks, self.cores)

    def expected(self, one: Scaled) -> float:
        """Return the same of the estimates."""
        speeds = [each.tokens / each.estimated_s for each in (self, one)]
        return speeds[0] / speeds[1] / min(self.point.ranks, self.cores)

    def told(self) -> dict[str, Any]:
        return asdict(self)


def measure(point: Point, machine: Any, steps: int, cores: int, *, is_smoke: bool = False) -> Scaled:
    """Train ``point`` with one thread in each rank and return what a step took."""
    from benchmarks.plan_parts.verdict import estimate_of
    from benchmarks.plan_training import train_rank
    from megatron.planner.spawn_ranks import run_ranks

    ranks = run_ranks(point.ranks, train_rank, point.case, is_smoke, steps, threads=1, deadline_s=600.0)
    slowest = [max(step) for step in zip(*(each.steps_s for each in ranks), strict=True)]
    estimate = estimate_of(point.case, machine, is_smoke=is_smoke)
    return Scaled(point, statistics.median(slowest), estimate.step_s, estimate.bubble, estimate.tokens, cores)


def table(rows: Sequence[Scaled]) -> str:
    """Return the rows in Markdown; the first is that of one rank."""
    one = rows[0]
    lines = [
        "| series | ranks | layout | samples | ms a step | tokens/s | efficiency | by the estimate | bubble |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        point = row.point
        lines.append(
            f"| {point.series} | {point.ranks} | {point.name} | {point.samples} | {row.step_s * 1e3:.0f} | "
            f"{row.tokens_per_s:,.0f} | {row.efficiency(one):.2f} | {row.expected(one):.2f} | {row.bubble:.1%} |"
        )
    return "\n".join(lines)
