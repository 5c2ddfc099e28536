"""A recorded step is compared with a simulation of its own costs: exact where the record is a simulation's."""

from __future__ import annotations

import pytest

from benchmarks.pipe.cuts import Recorded, compare, costs_of
from tds.action_times import Work
from tds.schedule import Costs, Placement, received, schedule_named, simulate

MICRO_BATCHES = 5
START_NS = 10**12


def recorded(name: str, costs: Costs, num_chunks: int = 1, late_s: float = 0.0) -> list[Recorded]:
    """Return the record of a step of two stages as it would be if it ran like the simulation, ``late_s`` longer."""
    order = schedule_named(name, num_chunks)
    timeline = simulate([order(2, MICRO_BATCHES, stage) for stage in range(2)], costs, num_chunks)
    found = []
    for stage, spans in enumerate(timeline.spans):
        work, free_ns = [], START_NS
        for span in spans:
            start, end = START_NS + round(span.start_s * 1e9), START_NS + round(span.end_s * 1e9)
            has_message = received(span.action, stage, Placement(2, num_chunks)) is not None
            work.append(Work(span.action, free_ns, end, ((free_ns, start),) if has_message else ()))
            free_ns = end
        tail_s = timeline.step_s - spans[-1].end_s + 0.5
        found.append(Recorded(work, timeline.step_s + 0.5 + late_s, tail_s))
    return found


@pytest.mark.parametrize(("name", "num_chunks"), [("1f1b", 1), ("gpipe", 1), ("zb-h1", 1), ("interleaved", 2)])
def test_the_costs_of_a_simulated_step_are_found_again(name: str, num_chunks: int) -> None:
    pieces = 2 * num_chunks
    costs = Costs((1.0, 2.0, 1.5, 1.0)[:pieces], (1.25, 1.0, 2.0, 1.0)[:pieces], (0.5, 0.75, 1.0, 0.5)[:pieces], 0.125)
    steps = recorded(name, costs, num_chunks)
    found = costs_of([each.work for each in steps], num_chunks)
    assert found.forward == pytest.approx(costs.forward)
    both = [b + w for b, w in zip(costs.backward_input, costs.backward_weight, strict=True)]
    assert [b + w for b, w in zip(found.backward_input, found.backward_weight, strict=True)] == pytest.approx(both)
    assert found.transfer == pytest.approx(costs.transfer)
    assert compare(steps, num_chunks).ratio == pytest.approx(1.0)


def test_time_that_no_action_explains_shows_in_the_ratio() -> None:
    costs = Costs.even(2)
    on_time, late = recorded("1f1b", costs), recorded("1f1b", costs, late_s=2.0)
    step_s = on_time[0].step_s
    assert compare(late, 1).ratio == pytest.approx((step_s + 2.0) / step_s)
