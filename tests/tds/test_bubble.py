"""The measured bubble equals the simulated one, and is exact on given times."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from tds.bubble import BubbleMeter, bubble_of
from tds.clock import HostClock
from tds.pipe import PipelineModule
from tds.schedule import Costs, schedule_named, simulate
from tests.harness import run_ranks
from tests.tds.toys import Toy, make_engine

UNIT_S = 0.04


def test_the_share_counts_waits_and_the_ends_of_stages_that_are_done_early() -> None:
    early_end, late_start = (0, 60, 10), (5, 100, 35)
    assert bubble_of([[early_end], [late_start]]) == pytest.approx(1 - (50 + 60) / 200)
    assert bubble_of([[(0, 10, 0)], [(0, 10, 0)]]) == 0
    assert bubble_of([[], []]) is None


def test_a_meter_gives_each_step_once() -> None:
    meter = BubbleMeter(HostClock())
    meter.note(100, 200, [(120, 130), (150, 155)])
    meter.note(300, 400, [])
    (began, ended, waited), second = meter.drain()
    assert ended - began == 100 and waited == 15 and second[2] == 0
    assert meter.drain() == []


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


def _measure(rank: int, units: list[float]) -> list[float | None]:
    toy = Toy(dtype=torch.float32)
    engine = sleepers(toy, units)
    bubbles = []
    for _ in range(2):
        engine.train_batch(iter(toy.batches()))
        bubbles.append(engine.bubble())
    return [*bubbles, engine.bubble()]


@pytest.mark.parametrize("units", [[1.0, 1.0], [1.0, 2.0]])
def test_the_measured_bubble_is_the_simulated_one(units: list[float]) -> None:
    m = Toy().micro_batches
    order = schedule_named("1f1b")
    costs = Costs(tuple(units), tuple(units), (0.0,) * len(units))
    wanted = simulate([order(len(units), m, stage) for stage in range(len(units))], costs).bubble
    first, second = run_ranks(len(units), _measure, units)
    assert first == second and first[2] is None
    assert first[1] == pytest.approx(wanted, abs=0.12), "measured, simulated"
