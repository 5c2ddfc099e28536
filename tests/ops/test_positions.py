"""Buckets of distances."""

from __future__ import annotations

import math

import pytest
import torch

from megatron.ops.positions import relative_buckets


def bucket(distance, num_buckets, max_distance, is_bidirectional):
    """Return the bucket of one distance, by the words of the paper."""
    first, size = 0, num_buckets
    if is_bidirectional:
        size //= 2
        first = size if distance > 0 else 0
        away = abs(distance)
    else:
        away = max(-distance, 0)
    exact = size // 2
    if away < exact:
        return first + away
    steps = math.log(away / exact) / math.log(max_distance / exact) * (size - exact)
    return first + min(exact + int(steps + 1e-6), size - 1)  # an edge belongs to the bucket that begins there


@pytest.mark.parametrize("is_bidirectional", [True, False])
@pytest.mark.parametrize(("num_buckets", "max_distance"), [(32, 128), (8, 6), (16, 40), (10, 33)])
def test_buckets_hold_one_distance_each_and_then_grow(num_buckets, max_distance, is_bidirectional):
    distances = torch.arange(-300, 301)
    how = {"num_buckets": num_buckets, "max_distance": max_distance, "is_bidirectional": is_bidirectional}
    expected = [bucket(d, **how) for d in distances.tolist()]
    assert relative_buckets(distances, **how).tolist() == expected
    assert set(expected) <= set(range(num_buckets))
