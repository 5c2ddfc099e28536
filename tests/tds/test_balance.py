"""Cuts by time: the slowest stage is as fast as can be."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tds.partition import TOLERANCE, _cheapest_partition, partition_balanced_chunks, partition_by_times
from tds.schedule import LOOP, Costs, V, schedule_named, simulate
from tds.schedule.simulate import candidate_schedules

TIMES = st.lists(st.floats(0.05, 2), min_size=6, max_size=9)


def slowest_stage_time(times: list[float], bounds: list[int], num_stages: int) -> float:
    chunk_times = [sum(times[start:stop]) for start, stop in itertools.pairwise(bounds)]
    return max(sum(chunk_times[stage::num_stages]) for stage in range(num_stages))


def all_partitions(num_layers: int, num_chunks: int) -> list[list[int]]:
    return [[0, *inner, num_layers] for inner in itertools.combinations(range(1, num_layers), num_chunks - 1)]


@settings(max_examples=60, deadline=None)
@given(TIMES, st.integers(1, 3))
def test_partition_minimizes_slowest_stage(times: list[float], num_stages: int) -> None:
    bounds = partition_by_times(times, [1] * len(times), num_stages)
    expected = min(
        slowest_stage_time(times, candidate, num_stages) for candidate in all_partitions(len(times), num_stages)
    )
    assert bounds[0] == 0 and bounds[-1] == len(times) and all(a < b for a, b in itertools.pairwise(bounds))
    assert slowest_stage_time(times, bounds, num_stages) <= expected * (1 + TOLERANCE) * (1 + 1e-9)


def total_step_time(times: list[float], bounds: list[int], num_stages: int, num_chunks: int, placement: str) -> float:
    """Return what steps of all schedules for such chunks take together, by their own simulation."""
    thirds = tuple(sum(times[start:stop]) / 3 for start, stop in itertools.pairwise(bounds))
    total = 0.0
    for name in candidate_schedules("auto", num_chunks, placement):
        order = schedule_named(name, num_chunks, placement)
        stages = [order(num_stages, 4 * num_stages, stage) for stage in range(num_stages)]
        total += simulate(stages, Costs(thirds, thirds, thirds), num_chunks, placement).step_s
    return total


@settings(max_examples=12, deadline=None)
@given(TIMES, st.integers(2, 3), st.sampled_from([LOOP, V]))
def test_chunk_partition_minimizes_step_time(times: list[float], num_stages: int, placement: str) -> None:
    bounds = partition_by_times(times, [1] * len(times), num_stages, 2, placement)
    partitions = all_partitions(len(times), 2 * num_stages)
    expected = min(total_step_time(times, candidate, num_stages, 2, placement) for candidate in partitions)
    assert bounds in partitions
    assert total_step_time(times, bounds, num_stages, 2, placement) <= expected * (1 + TOLERANCE) * (1 + 1e-9)


HALF_LAYERS = [3.0, *[28.0, 37.0] * 8, 2.0, 190.0]
"""Of a GPT-2 whose head takes as long as three layers, in attentions and feed-forwards."""


@pytest.mark.parametrize(("placement", "expected_bounds"), [(LOOP, [0, 6, 11, 17, 19]), (V, [0, 6, 9, 17, 19])])
def test_partition_depends_on_placement(placement: str, expected_bounds: list[int]) -> None:
    assert partition_by_times(HALF_LAYERS, [1] * 19, 2, 2, placement) == expected_bounds
    even_stages_time = total_step_time(HALF_LAYERS, [0, 1, 3, 14, 19], 2, 2, LOOP)  # even stages, but uneven chunks
    assert total_step_time(HALF_LAYERS, [0, 6, 11, 17, 19], 2, 2, LOOP) < 0.82 * even_stages_time


@pytest.mark.parametrize(
    ("times", "num_stages", "bounds"),
    [
        ([2.0, 2.1, 1.0, 1.0], 2, [0, 2, 4]),
        ([1.0, 1.0, 1.0, 1.2, 1.0], 2, [0, 3, 5]),
        ([3.0, 1.0, 1.1, 1.0], 2, [0, 1, 4]),
    ],
)
def test_partition_matches_known_bounds(times: list[float], num_stages: int, bounds: list[int]) -> None:
    assert partition_by_times(times, [1] * len(times), num_stages) == bounds


def test_equal_times_are_partitioned_by_parameters() -> None:
    assert partition_by_times([3, 1, 1, 1, 3], [1, 1, 1, 1, 1], 3) == [0, 1, 4, 5]
    assert partition_by_times([2.0, 1e-9, 2.0], [5, 7, 1], 2) == [0, 1, 3]
    assert partition_by_times([2.0, 1e-9, 2.0], [1, 7, 5], 2) == [0, 2, 3]


def test_large_model_partition_beats_balanced_chunks() -> None:
    times = [0.2, *[1.0, 1.3] * 20, 0.1, 9.0]
    bounds, even = partition_by_times(times, [1] * 43, 4, 3), partition_balanced_chunks(times, 4, 3)
    assert len(bounds) == 13
    assert total_step_time(times, bounds, 4, 3, LOOP) < 0.95 * total_step_time(times, even, 4, 3, LOOP)


def test_search_moves_two_bounds_together() -> None:
    times = [0.2, *(1.0 + 0.3 * (7 * i % 5 < 2) for i in range(30)), 9.0]
    bounds = partition_by_times(times, [1] * 32, 3, 3)
    assert total_step_time(times, bounds, 3, 3, LOOP) < 402  # 398, and 410 by moving one at a time


def test_partition_rejects_too_few_layers() -> None:
    with pytest.raises(ValueError, match="3 layers for 2 stages x 2 chunks"):
        partition_by_times([1, 1, 1], [1, 1, 1], 2, 2)


def test_cheapest_partition_breaks_ties_as_requested() -> None:
    def length(start: int, stop: int) -> float:
        return stop - start

    assert _cheapest_partition(5, 3, length, max) == (2, [0, 1, 3, 5])
    assert _cheapest_partition(5, 3, length, max, "last") == (2, [0, 2, 4, 5])
