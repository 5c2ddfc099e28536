"""Cuts by time: the slowest stage is as fast as can be."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tds.partition import TOLERANCE, _cheapest_cut, partition_balanced_chunks, partition_by_times
from tds.schedule import LOOP, Costs, V, schedule_named, simulate
from tds.schedule.simulate import candidates

TIMES = st.lists(st.floats(0.05, 2), min_size=6, max_size=9)


def slowest(times: list[float], bounds: list[int], num_stages: int) -> float:
    pieces = [sum(times[start:stop]) for start, stop in itertools.pairwise(bounds)]
    return max(sum(pieces[stage::num_stages]) for stage in range(num_stages))


def every_cut(num_layers: int, num_pieces: int) -> list[list[int]]:
    return [[0, *inner, num_layers] for inner in itertools.combinations(range(1, num_layers), num_pieces - 1)]


@settings(max_examples=60, deadline=None)
@given(TIMES, st.integers(1, 3))
def test_no_other_cut_has_a_faster_slowest_stage(times: list[float], num_stages: int) -> None:
    bounds = partition_by_times(times, [1] * len(times), num_stages)
    wanted = min(slowest(times, each, num_stages) for each in every_cut(len(times), num_stages))
    assert bounds[0] == 0 and bounds[-1] == len(times) and all(a < b for a, b in itertools.pairwise(bounds))
    assert slowest(times, bounds, num_stages) <= wanted * (1 + TOLERANCE) * (1 + 1e-9)


def step_s(times: list[float], bounds: list[int], num_stages: int, num_chunks: int, placement: str) -> float:
    """Return what steps of all schedules for such chunks take together, by their own simulation."""
    thirds = tuple(sum(times[start:stop]) / 3 for start, stop in itertools.pairwise(bounds))
    total = 0.0
    for name in candidates("auto", num_chunks, placement):
        order = schedule_named(name, num_chunks, placement)
        stages = [order(num_stages, 4 * num_stages, stage) for stage in range(num_stages)]
        total += simulate(stages, Costs(thirds, thirds, thirds), num_chunks, placement).step_s
    return total


@settings(max_examples=12, deadline=None)
@given(TIMES, st.integers(2, 3), st.sampled_from([LOOP, V]))
def test_no_other_cut_into_chunks_has_a_faster_step(times: list[float], num_stages: int, placement: str) -> None:
    bounds = partition_by_times(times, [1] * len(times), num_stages, 2, placement)
    every = every_cut(len(times), 2 * num_stages)
    wanted = min(step_s(times, each, num_stages, 2, placement) for each in every)
    assert bounds in every
    assert step_s(times, bounds, num_stages, 2, placement) <= wanted * (1 + TOLERANCE) * (1 + 1e-9)


HALF_LAYERS = [3.0, *[28.0, 37.0] * 8, 2.0, 190.0]
"""Of a GPT-2 whose head takes as long as three layers, in attentions and feed-forwards."""


@pytest.mark.parametrize(("placement", "best"), [(LOOP, [0, 6, 11, 17, 19]), (V, [0, 6, 9, 17, 19])])
def test_half_layers_are_cut_for_the_schedules_of_their_placement(placement: str, best: list[int]) -> None:
    assert partition_by_times(HALF_LAYERS, [1] * 19, 2, 2, placement) == best
    by_stages = step_s(HALF_LAYERS, [0, 1, 3, 14, 19], 2, 2, LOOP)  # even stages, but uneven chunks
    assert step_s(HALF_LAYERS, [0, 6, 11, 17, 19], 2, 2, LOOP) < 0.82 * by_stages


@pytest.mark.parametrize(
    ("times", "num_stages", "bounds"),
    [
        ([2.0, 2.1, 1.0, 1.0], 2, [0, 2, 4]),
        ([1.0, 1.0, 1.0, 1.2, 1.0], 2, [0, 3, 5]),
        ([3.0, 1.0, 1.1, 1.0], 2, [0, 1, 4]),
    ],
)
def test_cuts_that_are_known(times: list[float], num_stages: int, bounds: list[int]) -> None:
    assert partition_by_times(times, [1] * len(times), num_stages) == bounds


def test_equal_times_are_cut_by_parameters() -> None:
    assert partition_by_times([3, 1, 1, 1, 3], [1, 1, 1, 1, 1], 3) == [0, 1, 4, 5]
    assert partition_by_times([2.0, 1e-9, 2.0], [5, 7, 1], 2) == [0, 1, 3]
    assert partition_by_times([2.0, 1e-9, 2.0], [1, 7, 5], 2) == [0, 2, 3]


def test_a_big_model_in_chunks_is_cut_well_though_not_every_cut_is_tried() -> None:
    times = [0.2, *[1.0, 1.3] * 20, 0.1, 9.0]
    bounds, even = partition_by_times(times, [1] * 43, 4, 3), partition_balanced_chunks(times, 4, 3)
    assert len(bounds) == 13
    assert step_s(times, bounds, 4, 3, LOOP) < 0.95 * step_s(times, even, 4, 3, LOOP)


def test_two_bounds_move_together_where_neither_helps_alone() -> None:
    times = [0.2, *(1.0 + 0.3 * (7 * i % 5 < 2) for i in range(30)), 9.0]
    bounds = partition_by_times(times, [1] * 32, 3, 3)
    assert step_s(times, bounds, 3, 3, LOOP) < 402  # 398, and 410 by moving one at a time


def test_too_few_layers_are_told() -> None:
    with pytest.raises(ValueError, match="3 layers for 2 stages x 2 chunks"):
        partition_by_times([1, 1, 1], [1, 1, 1], 2, 2)


def test_the_one_program_breaks_ties_as_it_is_told() -> None:
    def length(start: int, stop: int) -> float:
        return stop - start

    assert _cheapest_cut(5, 3, length, max) == (2, [0, 1, 3, 5])
    assert _cheapest_cut(5, 3, length, max, "last") == (2, [0, 2, 4, 5])
