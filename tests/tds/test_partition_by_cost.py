"""Partition of layers of unequal cost into virtual stages, with several chunks per stage."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tds.partition import partition_balanced_chunks


def chunk_costs(costs: list[float], bounds: list[int]) -> list[float]:
    return [sum(costs[start:stop]) for start, stop in zip(bounds, bounds[1:], strict=False)]


@given(
    costs=st.lists(st.integers(1, 20), min_size=4, max_size=9),
    grid=st.sampled_from([(2, 2), (2, 1), (1, 3), (1, 4)]),
)
@settings(max_examples=40, deadline=None)
def test_partition_minimizes_largest_chunk_and_leaves_none_empty(costs, grid):
    stages, chunks = grid
    bounds = partition_balanced_chunks(costs, stages, chunks)
    assert (bounds[0], bounds[-1], len(bounds)) == (0, len(costs), stages * chunks + 1)
    assert all(start < stop for start, stop in zip(bounds, bounds[1:], strict=False))
    candidates = combinations(range(1, len(costs)), stages * chunks - 1)
    min_cost = min(max(chunk_costs(costs, [0, *inner_bounds, len(costs)])) for inner_bounds in candidates)
    assert max(chunk_costs(costs, bounds)) == min_cost


def test_partition_balances_stages_without_larger_chunks():
    """The most even virtual stages, 3 + 4 + 5 + 6 from left to right, leave the stages 8 and 10."""
    costs = [3.0, 1, 1, 1, 1, 3, 1, 1, 6]
    cost_per_chunk = chunk_costs(costs, partition_balanced_chunks(costs, 2, 2))
    assert max(cost_per_chunk) == 6
    assert sorted((cost_per_chunk[0] + cost_per_chunk[2], cost_per_chunk[1] + cost_per_chunk[3])) == [9, 9]


def test_partition_rejects_fewer_layers_than_chunks():
    with pytest.raises(ValueError, match="3 layers can be partitioned into 1 to 3 parts, got 4"):
        partition_balanced_chunks([1.0, 1, 1], 2, 2)
