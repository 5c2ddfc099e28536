"""What replicas send is put where it belongs, whatever the cut and however many they are; without ranks."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.optim.zero.gather import ShardedWeight
from megatron.optim.zero.partition import partition_of
from tds.gradients import buckets
from tests.optim.zero.test_cuts import parameters, parts_of


@settings(max_examples=100, deadline=None)
@given(parameters(), st.integers(2, 9))
def test_every_part_comes_to_its_place_in_copies_as_few_as_lengths(like, replicas):
    cut, wanted = partition_of(like, replicas), torch.arange(1.0, like.numel() + 1).view(like.shape)
    piece = ShardedWeight(torch.zeros(like.shape), torch.empty(0), cut)
    slots = torch.full((replicas, piece.slot_numel), -1.0)
    for slot, part in zip(slots, parts_of(cut, wanted), strict=True):
        slot[: part.numel()].copy_(part.reshape(-1))
    copies = list(piece.copies(slots))
    for parts, sent in copies:
        parts.copy_(sent)
    assert torch.equal(piece.parameter, wanted) and len(copies) <= 3


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(1, 50), max_size=12), st.integers(1, 400))
def test_buckets_keep_the_order_and_the_limit(sizes, limit):
    pieces = [ShardedWeight(torch.zeros(size), torch.empty(0), partition_of(torch.zeros(size), 2)) for size in sizes]
    found = list(buckets(pieces, lambda piece: piece.parameter.nbytes, lambda piece: piece.parameter.dtype, limit))
    assert [piece for bucket in found for piece in bucket] == pieces
    weights = [[piece.parameter.nbytes for piece in bucket] for bucket in found]
    assert all(sum(own) <= limit or len(own) == 1 for own in weights)
    assert all(sum(own) + after[0] > limit for own, after in zip(weights, weights[1:], strict=False))
