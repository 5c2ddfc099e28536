"""Buckets of distances."""

from __future__ import annotations

import math

import pytest
import torch

from megatron.ops.positions import relative_buckets


def reference_bucket(distance, num_buckets, max_distance, is_bidirectional):
    """Return the bucket of one distance, by the words of the paper."""
    offset, num_side_buckets = 0, num_buckets
    if is_bidirectional:
        num_side_buckets //= 2
        offset = num_side_buckets if distance > 0 else 0
        magnitude = abs(distance)
    else:
        magnitude = max(-distance, 0)
    num_exact = num_side_buckets // 2
    if magnitude < num_exact:
        return offset + magnitude
    log_steps = math.log(magnitude / num_exact) / math.log(max_distance / num_exact) * (num_side_buckets - num_exact)
    return offset + min(
        num_exact + int(log_steps + 1e-6), num_side_buckets - 1
    )  # an edge belongs to the bucket that begins there


@pytest.mark.parametrize("is_bidirectional", [True, False])
@pytest.mark.parametrize(("num_buckets", "max_distance"), [(32, 128), (8, 6), (16, 40), (10, 33)])
def test_relative_buckets_match_formula(num_buckets, max_distance, is_bidirectional):
    distances = torch.arange(-300, 301)
    bucket_args = {"num_buckets": num_buckets, "max_distance": max_distance, "is_bidirectional": is_bidirectional}
    expected = [reference_bucket(d, **bucket_args) for d in distances.tolist()]
    assert relative_buckets(distances, **bucket_args).tolist() == expected
    assert set(expected) <= set(range(num_buckets))
