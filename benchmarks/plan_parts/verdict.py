"""Estimate beside measurement: ratios, whether they are within their bars, and the table."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.plan_cases import Case
from benchmarks.plan_training import Measured, config_of
from megatron.models.common.memory import BYTES
from megatron.planner.estimate import Estimate, Planner
from megatron.planner.layout import layout_of
from megatron.planner.machine import Link, Machine

TIME_BAR, MEMORY_BAR = 0.15, 0.10

UNTIMED = Machine(
    name="a CPU of which no rate is known",
    memory_bytes=2**34,
    devices_per_node=8,
    peak_flops=dict.fromkeys(BYTES, 1e11),
    product_flops=dict.fromkeys(BYTES, ((64.0, 1e11),)),
    memory_bandwidth=1e10,
    update_bandwidth=1e10,
    overhead_s=1e-5,
    intra=Link.of(1e9, 1e-4),
    inter=Link.of(1e9, 1e-4),
    is_cpu=True,
)
"""For memory, which depends on the machine by ``is_cpu`` alone."""


@dataclass(frozen=True)
class Row:
    """One case: estimate and measurement, of memory those of the rank that is farthest off; None: not timed."""

    name: str
    estimated_s: float
    measured_s: float | None
    estimated_bytes: int
    measured_bytes: int
    stage: int
    parts: dict[str, float]
    bubble: float

    @property
    def time_ratio(self) -> float | None:
        return None if self.measured_s is None else self.estimated_s / self.measured_s

    @property
    def memory_ratio(self) -> float:
        return self.estimated_bytes / self.measured_bytes

    @property
    def is_time_met(self) -> bool | None:
        return None if self.time_ratio is None else abs(self.time_ratio - 1) <= TIME_BAR

    @property
    def is_memory_met(self) -> bool:
        return abs(self.memory_ratio - 1) <= MEMORY_BAR

    @property
    def is_met(self) -> bool:
        return self.is_memory_met and self.is_time_met is not False

    def __str__(self) -> str:
        time = "" if self.time_ratio is None else f"step time {self.time_ratio:.3f}, "
        return f"{self.name}: {time}memory {self.memory_ratio:.3f} of what was measured"

    def told(self) -> dict[str, Any]:
        """Return everything, for JSON."""
        names = ("time_ratio", "memory_ratio", "is_time_met", "is_memory_met")
        return asdict(self) | {name: getattr(self, name) for name in names}


def estimate_of(case: Case, machine: Machine = UNTIMED, *, is_smoke: bool = False) -> Estimate:
    """Return what the planner says of ``case``."""
    config = config_of(case, is_smoke=is_smoke)
    return Planner(config, machine).estimate(layout_of(config, case.ranks))


def row_of(case: Case, estimate: Estimate, ranks: Sequence[Measured], *, by_cpu_time: bool = False) -> Row:
    """Return estimate and measurement of one case.

    A step lasts as long as its slowest rank takes; the median over the steps counts.
    """
    series = [each.cpu_s if by_cpu_time else each.steps_s for each in ranks]
    slowest = [max(step) for step in zip(*series, strict=True)]
    worst = max(ranks, key=lambda each: abs(estimate.memory[each.stage].total / each.peak_bytes - 1))
    return Row(
        name=case.name,
        estimated_s=estimate.step_s,
        measured_s=statistics.median(slowest) if slowest else None,
        estimated_bytes=estimate.memory[worst.stage].total,
        measured_bytes=worst.peak_bytes,
        stage=worst.stage,
        parts=dict(estimate.parts),
        bubble=estimate.bubble,
    )


def table(rows: Sequence[Row]) -> str:
    """Return the rows as text, the farthest from measurement last, and what is not met."""
    lines = [f"{'':44}{'ms a step':>20}{'':8}{'MiB of the worst rank':>26}", f"{'layout':44}{_HEAD}{_HEAD}"]
    for row in rows:
        step = _pair(row.estimated_s * 1e3, _ms(row), row.time_ratio, row.is_time_met)
        size = _pair(row.estimated_bytes / 2**20, row.measured_bytes / 2**20, row.memory_ratio, row.is_memory_met)
        lines.append(f"{row.name:44}{step}{size}".rstrip())
    timed = [row for row in rows if row.time_ratio is not None]
    if timed:
        lines.append(_summary("step time", [row.time_ratio or 0.0 for row in timed], TIME_BAR))
    lines.append(_summary("memory", [row.memory_ratio for row in rows], MEMORY_BAR))
    return "\n".join(lines)


_HEAD = f"{'estimate':>11}{'measured':>11}{'ratio':>8}{'':5}"


def _ms(row: Row) -> float | None:
    return None if row.measured_s is None else row.measured_s * 1e3


def _pair(estimated: float, measured: float | None, ratio: float | None, is_met: bool | None) -> str:
    if measured is None or ratio is None:
        return f"{'-':>11}{'-':>11}{'-':>8}{'':5}"
    return f"{estimated:11.1f}{measured:11.1f}{ratio:8.3f}{'' if is_met else ' FAR':5}"


def _summary(what: str, ratios: Sequence[float], bar: float) -> str:
    far = sum(abs(ratio - 1) > bar for ratio in ratios)
    verdict = "met" if not far else f"NOT met by {far} of {len(ratios)}"
    worst = max(ratios, key=lambda ratio: abs(ratio - 1))
    return f"{what}: within {bar:.0%} of measurement: {verdict}; worst ratio {worst:.3f}"
