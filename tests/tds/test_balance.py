"""Cuts by time: the slowest stage is as fast as can be."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tds.partition import TOLERANCE, _cheapest_cut, partition_by_times

TIMES = st.lists(st.floats(0.05, 2), min_size=6, max_size=9)


def slowest(times: list[float], bounds: list[int], num_stages: int) -> float:
    pieces = [sum(times[start:stop]) for start, stop in itertools.pairwise(bounds)]
    return max(sum(pieces[stage::num_stages]) for stage in range(num_stages))


def every_cut(num_layers: int, num_pieces: int) -> list[list[int]]:
    return [[0, *inner, num_layers] for inner in itertools.combinations(range(1, num_layers), num_pieces - 1)]


@settings(max_examples=100, deadline=None)
@given(TIMES, st.integers(1, 3), st.integers(1, 2))
def test_no_other_cut_has_a_faster_slowest_stage(times: list[float], num_stages: int, num_chunks: int) -> None:
    bounds = partition_by_times(times, [1] * len(times), num_stages, num_chunks)
    wanted = min(slowest(times, each, num_stages) for each in every_cut(len(times), num_stages * num_chunks))
    assert bounds[0] == 0 and bounds[-1] == len(times) and all(a < b for a, b in itertools.pairwise(bounds))
    assert slowest(times, bounds, num_stages) <= wanted * (1 + TOLERANCE) * (1 + 1e-9)


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
    times = [1.0 + 0.37 * ((7 * i) % 5) for i in range(40)]
    bounds = partition_by_times(times, [1] * 40, 4, 3)
    assert len(bounds) == 13
    assert slowest(times, bounds, 4) <= 1.03 * sum(times) / 4


def test_too_few_layers_are_told() -> None:
    with pytest.raises(ValueError, match="3 layers for 2 stages x 2 chunks"):
        partition_by_times([1, 1, 1], [1, 1, 1], 2, 2)


def test_the_one_program_breaks_ties_as_it_is_told() -> None:
    def length(start: int, stop: int) -> float:
        return stop - start

    assert _cheapest_cut(5, 3, length, max) == (2, [0, 1, 3, 5])
    assert _cheapest_cut(5, 3, length, max, "last") == (2, [0, 2, 4, 5])
