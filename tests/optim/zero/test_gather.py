"""Gathered shards are copied to their positions, for any partition and number of replicas; without processes."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.optim.zero.gather import ShardedWeight
from megatron.optim.zero.partition import partition_of
from tds.gradients import make_buckets
from tests.optim.zero.test_cuts import parameters, shards_of


@settings(max_examples=100, deadline=None)
@given(parameters(), st.integers(2, 9))
def test_shards_are_gathered_with_few_copies(template, replicas):
    partition, expected = partition_of(template, replicas), torch.arange(1.0, template.numel() + 1).view(template.shape)
    weight = ShardedWeight(torch.zeros(template.shape), torch.empty(0), partition)
    slots = torch.full((replicas, weight.slot_numel), -1.0)
    for slot, shard in zip(slots, shards_of(partition, expected), strict=True):
        slot[: shard.numel()].copy_(shard.reshape(-1))
    copies = list(weight.copy_pairs(slots))
    for target, source in copies:
        target.copy_(source)
    assert torch.equal(weight.parameter, expected) and len(copies) <= 3


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(1, 50), max_size=12), st.integers(1, 400))
def test_buckets_keep_order_and_limit(numels, limit):
    sharded_weights = [
        ShardedWeight(torch.zeros(size), torch.empty(0), partition_of(torch.zeros(size), 2)) for size in numels
    ]
    result = list(
        make_buckets(
            sharded_weights,
            lambda sharded_weight: sharded_weight.parameter.nbytes,
            lambda sharded_weight: sharded_weight.parameter.dtype,
            limit,
        )
    )
    assert [sharded_weight for bucket in result for sharded_weight in bucket] == sharded_weights
    bucket_bytes = [[sharded_weight.parameter.nbytes for sharded_weight in bucket] for bucket in result]
    assert all(sum(current) <= limit or len(current) == 1 for current in bucket_bytes)
    assert all(
        sum(current) + following[0] > limit for current, following in zip(bucket_bytes, bucket_bytes[1:], strict=False)
    )
