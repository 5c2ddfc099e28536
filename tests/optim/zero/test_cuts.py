"""How ZeRO 1 cuts parameters: parts tile what a rank holds, are even, and get the bits of the whole."""

from __future__ import annotations

import itertools
import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.checkpoint.tensor_record import tiling_problem
from megatron.mpu.shard import Shard, set_shard, shard_of
from megatron.optim.zero.partition import VECTOR, partition_of
from tests.helpers.whole import random

shapes = st.lists(st.integers(1, 40), min_size=1, max_size=3).map(tuple)


@st.composite
def parameters(draw):
    """A parameter that a tensor rank holds: whole, or cut along any dimension, with padding or without."""
    local = draw(shapes)
    if not draw(st.booleans()):
        return torch.nn.Parameter(torch.zeros(local))
    dim, start = draw(st.integers(0, len(local) - 1)), draw(st.sampled_from((0, 7)))
    real = draw(st.integers(0, local[dim]))
    whole = (*local[:dim], start + real + draw(st.sampled_from((0, 5))), *local[dim + 1 :])
    return set_shard(torch.nn.Parameter(torch.zeros(local)), Shard(whole, dim, start, real))


def parts_of(cut, tensor):
    return [cut.slice(tensor, replica) for replica in range(len(cut.bounds) - 1)]


@settings(max_examples=150, deadline=None)
@given(parameters(), st.integers(2, 6))
def test_parts_tile_what_the_rank_holds_in_whole_vectors_and_evenly(parameter, replicas):
    cut = partition_of(parameter, replicas)
    assert (cut.bounds[0], cut.bounds[-1]) == (0, parameter.shape[cut.dim])
    lengths = [stop - start for start, stop in itertools.pairwise(cut.bounds)]
    assert len(lengths) == replicas and min(lengths) >= 0
    in_runs = [(first + i, length) for first, number, length in cut.runs for i in range(number)]
    assert in_runs == [(replica, length) for replica, length in enumerate(lengths) if length] and len(cut.runs) <= 3
    row = parameter.numel() // parameter.shape[cut.dim]
    if 0 < cut.bounds[1] < parameter.shape[cut.dim]:
        assert all(bound * row % VECTOR == 0 for bound in cut.bounds if bound < parameter.shape[cut.dim])
        unit = VECTOR // math.gcd(VECTOR, row)
        assert max(lengths) - min(lengths) <= 2 * unit - 1, "one vector more, and the last may be short"


@settings(max_examples=150, deadline=None)
@given(parameters(), st.integers(2, 6))
def test_the_places_of_the_parts_tile_what_is_real_of_the_rank(parameter, replicas):
    cut, whole = partition_of(parameter, replicas), shard_of(parameter)
    parts = [cut.shard(whole, replica) for replica in range(replicas)]
    for part, local in zip(parts, parts_of(cut, parameter.detach()), strict=True):
        assert part.unpadded(local).shape[cut.dim] == part.length
        assert 0 <= part.start <= part.start + part.length <= whole.global_shape[cut.dim]
    first, real = 0, parameter.shape[cut.dim]
    if whole.partition_dim == cut.dim:
        first, real = whole.start, whole.length
    shifted = [Shard((real,), 0, part.start - first, part.length) for part in parts]
    assert tiling_problem((real,), shifted) is None or real == 0


def test_a_weight_cut_by_the_tensor_group_is_cut_along_the_same_dimension():
    rows = set_shard(torch.nn.Parameter(torch.zeros(32, 64)), Shard((32, 128), 1, 64, 64))
    assert partition_of(rows, 2).shard(shard_of(rows), 1) == Shard((32, 128), 1, 96, 32)
    alone = set_shard(torch.nn.Parameter(torch.zeros(32, 128)), Shard((32, 128), 1, 0, 128))
    assert partition_of(alone, 2).shard(shard_of(alone), 1) == Shard((32, 128), 0, 16, 16), "row slices are contiguous"


def test_a_weight_with_fewer_vectors_than_replicas_leaves_some_without_a_part():
    assert partition_of(torch.zeros(20), 4).bounds == (0, 16, 20, 20, 20)
    assert partition_of(torch.zeros(2, 16), 3).bounds == (0, 1, 2, 2)
    assert partition_of(torch.tensor(1.0), 2) is None


def test_columns_that_make_no_whole_vectors_stay_with_one_replica():
    odd = set_shard(torch.nn.Parameter(torch.zeros(8, 15)), Shard((8, 30), 1, 15, 15))
    assert partition_of(odd, 2).bounds == (0, 15, 15), (
        "the last numbers of its memory are not those of the last columns"
    )
    even = set_shard(torch.nn.Parameter(torch.zeros(8, 14)), Shard((8, 28), 1, 14, 14))
    assert partition_of(even, 2).bounds == (0, 8, 14)


@settings(max_examples=25, deadline=None)
@given(parameters(), st.integers(2, 4), st.sampled_from([torch.float32, torch.float64]))
def test_fused_adamw_gives_parts_the_bits_of_the_whole(like, replicas, dtype):
    start, cut = random(1, *like.shape).to(dtype), partition_of(like, replicas)
    whole = torch.nn.Parameter(start.clone())
    parts = [torch.nn.Parameter(part.clone(memory_format=torch.contiguous_format)) for part in parts_of(cut, start)]
    optimizers = [torch.optim.AdamW(these, lr=1e-2, weight_decay=0.1, fused=True) for these in ([whole], parts)]
    for step in range(5):
        whole.grad = random(2 + step, *like.shape).to(dtype)
        for part, gradient in zip(parts, parts_of(cut, whole.grad), strict=True):
            part.grad = gradient.contiguous()
        for optimizer in optimizers:
            optimizer.step()
    assert torch.equal(torch.cat([part.detach() for part in parts], cut.dim), whole.detach())
