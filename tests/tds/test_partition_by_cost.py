"""Pieces of several chunks from layers of unequal cost."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tds.partition import partition_balanced_chunks


def pieces_of(costs: list[float], bounds: list[int]) -> list[float]:
    return [sum(costs[start:stop]) for start, stop in zip(bounds, bounds[1:], strict=False)]


@given(
    costs=st.lists(st.integers(1, 20), min_size=4, max_size=9),
    grid=st.sampled_from([(2, 2), (2, 1), (1, 3), (1, 4)]),
)
@settings(max_examples=40, deadline=None)
def test_no_piece_costs_more_than_one_must_and_none_is_empty(costs, grid):
    stages, chunks = grid
    bounds = partition_balanced_chunks(costs, stages, chunks)
    assert (bounds[0], bounds[-1], len(bounds)) == (0, len(costs), stages * chunks + 1)
    assert all(start < stop for start, stop in zip(bounds, bounds[1:], strict=False))
    cuts = combinations(range(1, len(costs)), stages * chunks - 1)
    least = min(max(pieces_of(costs, [0, *cut, len(costs)])) for cut in cuts)
    assert max(pieces_of(costs, bounds)) == least


def test_stages_are_evened_out_where_no_piece_grows():
    """The most even pieces, 3 + 4 + 5 + 6 from left to right, leave the stages 8 and 10."""
    costs = [3.0, 1, 1, 1, 1, 3, 1, 1, 6]
    pieces = pieces_of(costs, partition_balanced_chunks(costs, 2, 2))
    assert max(pieces) == 6
    assert sorted((pieces[0] + pieces[2], pieces[1] + pieces[3])) == [9, 9]


def test_fewer_layers_than_pieces_are_told():
    with pytest.raises(ValueError, match="3 layers can be partitioned into 1 to 3 parts, got 4"):
        partition_balanced_chunks([1.0, 1, 1], 2, 2)
