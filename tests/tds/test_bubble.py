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
from tds.engine.stage_table import bubble_of
from tds.pipe import PipelineModule
from tds.schedule import Costs, schedule_named, simulate
from tds.trace import read_traces
from tests.helpers.harness import run_ranks
from tests.helpers.toys import Toy, make_engine

UNIT_S = 0.03
STEPS = 4


def test_the_share_counts_waits_and_the_ends_of_stages_that_are_done_early() -> None:
    early_end, late_start = (0, 60, 10), (5, 100, 35)
    assert bubble_of([[early_end], [late_start]]) == pytest.approx(1 - (50 + 60) / 200)
    assert bubble_of([[(0, 10, 0)], [(0, 10, 0)]]) == 0
    assert bubble_of([[], []]) is None


def test_a_meter_gives_each_step_once() -> None:
    meter = BubbleTimer(HostClock())
    meter.note(100, 200, [(120, 130), (150, 155)])
    meter.note(300, 400, [])
    (began, ended, waited), second = meter.drain()
    assert ended - began == 100 and waited == 15 and second[2] == 0
    assert meter.drain() == []


def test_readers_take_no_steps_from_each_other() -> None:
    meter = BubbleTimer(HostClock())
    meter.note(100, 200, [])
    assert [row[1] - row[0] for row in meter.drain("report")] == [100]
    meter.note(300, 500, [])
    assert [row[1] - row[0] for row in meter.drain("program")] == [100, 200]
    assert [row[1] - row[0] for row in meter.drain("report")] == [200]
    assert meter.drain("report") == meter.drain("program") == []


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


def sleepers(toy: Toy, units: list[float]) -> Any:
    module = PipelineModule([Sleeper(each) for each in units], num_stages=len(units), loss_fn=lambda x, _: x.mean())
    return make_engine(toy, len(units), module=module)


def _measure(rank: int, units: list[float], folder: str) -> list[float | None]:
    plot.draw = lambda *_: None
    toy = Toy(dtype=torch.float32, pipeline={"trace": folder})
    engine = sleepers(toy, units)
    bubbles = []
    for _ in range(STEPS):
        engine.train_batch(iter(toy.batches()))
        bubbles.append(engine.bubble())
    return [*bubbles, engine.bubble()]


@pytest.mark.slow
def test_the_measured_bubble_is_that_of_the_trace_and_of_the_simulation(tmp_path: Path) -> None:
    """A machine with more to do adds idle time, which is measured too: so the trace says what each step must show."""
    units, m = [1.0, 2.0], Toy().micro_batches
    first, second = run_ranks(2, _measure, units, str(tmp_path))
    assert first == second and first.pop() is None
    traced = [step.timeline.bubble for step in read_traces(tmp_path)]
    assert first == pytest.approx(traced, abs=0.05), "measured, traced"
    order = schedule_named("1f1b")
    costs = Costs(tuple(units), tuple(units), (0.0, 0.0))
    wanted = simulate([order(2, m, stage) for stage in range(2)], costs).bubble
    assert statistics.median(first) == pytest.approx(wanted, abs=0.12), "measured, simulated"
