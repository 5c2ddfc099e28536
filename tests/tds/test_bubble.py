"""The measured bubble equals the simulated one, and is exact on given times."""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tds import plot
from tds.bubble_timer import BubbleTimer
from tds.clocks import HostClock
from tds.engine.stage_table import compute_bubble
from tds.pipe import PipelineModule
from tds.schedule import Costs, schedule_named, simulate
from tds.trace import read_traces
from tests.helpers.harness import run_ranks
from tests.helpers.toys import Toy, make_engine

UNIT_S = 0.03
STEPS = 4


def test_bubble_counts_waits_and_early_finish() -> None:
    early_end, late_start = (0, 60, 10), (5, 100, 35)
    assert compute_bubble([[early_end], [late_start]]) == pytest.approx(1 - (50 + 60) / 200)
    assert compute_bubble([[(0, 10, 0)], [(0, 10, 0)]]) == 0
    assert compute_bubble([[], []]) is None


def test_bubble_timer_drains_each_step_once() -> None:
    timer = BubbleTimer(HostClock())
    timer.record(100, 200, [(120, 130), (150, 155)])
    timer.record(300, 400, [])
    (start, end, waited), second = timer.drain()
    assert end - start == 100 and waited == 15 and second[2] == 0
    assert timer.drain() == []


def test_bubble_timer_readers_are_independent() -> None:
    timer = BubbleTimer(HostClock())
    timer.record(100, 200, [])
    assert [row[1] - row[0] for row in timer.drain("report")] == [100]
    timer.record(300, 500, [])
    assert [row[1] - row[0] for row in timer.drain("program")] == [100, 200]
    assert [row[1] - row[0] for row in timer.drain("report")] == [200]
    assert timer.drain("report") == timer.drain("program") == []


class _Nap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        time.sleep(ctx.seconds)
        return grad, None


class Sleeper(torch.nn.Module):
    """Takes a unit of time forwards and one backwards."""

    def __init__(self, units: float) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1))
        self.seconds = units * UNIT_S

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Nap.apply(x * self.weight, self.seconds)


def build_engine(toy: Toy, units: list[float]) -> Any:
    module = PipelineModule(
        [Sleeper(num_units) for num_units in units], num_stages=len(units), loss_fn=lambda x, _: x.mean()
    )
    return make_engine(toy, len(units), module=module)


def _measure(rank: int, units: list[float], folder: str) -> list[float | None]:
    plot.draw = lambda *_: None
    toy = Toy(dtype=torch.float32, pipeline={"trace": folder})
    engine = build_engine(toy, units)
    bubbles = []
    for _ in range(STEPS):
        engine.train_batch(iter(toy.make_batches()))
        bubbles.append(engine.bubble())
    return [*bubbles, engine.bubble()]


@pytest.mark.slow
def test_measured_bubble_equals_trace_and_simulation(tmp_path: Path) -> None:
    """A machine with more to do adds idle time, which is measured too: so the trace says what each step must show."""
    units, m = [1.0, 2.0], Toy().num_micro_batches
    first, second = run_ranks(2, _measure, units, str(tmp_path))
    assert first == second and first.pop() is None
    traced = [step.timeline.bubble for step in read_traces(tmp_path)]
    assert first == pytest.approx(traced, abs=0.05), "measured, traced"
    order = schedule_named("1f1b")
    costs = Costs(tuple(units), tuple(units), (0.0, 0.0))
    expected = simulate([order(2, m, stage) for stage in range(2)], costs).bubble
    assert statistics.median(first) == pytest.approx(expected, abs=0.12), "measured, simulated"
