"""Partition of parameters under ZeRO 1: shards tile the local tensor evenly, and their updates are bitwise equal."""

from __future__ import annotations

import itertools
import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.checkpoint.tensor_record import tiling_problem
from megatron.mpu.shard import Shard, set_shard, shard_of
from megatron.optim.zero.partition import VECTOR, partition_of
from tests.helpers.whole import random_tensor

shapes = st.lists(st.integers(1, 40), min_size=1, max_size=3).map(tuple)


@st.composite
def parameters(draw):
    """Draw the parameter of a tensor rank: unsharded, or sharded along any dimension, with or without padding."""
    local = draw(shapes)
    if not draw(st.booleans()):
        return torch.nn.Parameter(torch.zeros(local))
    dim, start = draw(st.integers(0, len(local) - 1)), draw(st.sampled_from((0, 7)))
    real_length = draw(st.integers(0, local[dim]))
    global_shape = (*local[:dim], start + real_length + draw(st.sampled_from((0, 5))), *local[dim + 1 :])
    return set_shard(torch.nn.Parameter(torch.zeros(local)), Shard(global_shape, dim, start, real_length))


def shards_of(partition, tensor):
    return [partition.slice(tensor, replica) for replica in range(len(partition.bounds) - 1)]


@settings(max_examples=150, deadline=None)
@given(parameters(), st.integers(2, 6))
def test_shards_tile_parameter_evenly_in_full_vectors(parameter, replicas):
    partition = partition_of(parameter, replicas)
    assert (partition.bounds[0], partition.bounds[-1]) == (0, parameter.shape[partition.dim])
    lengths = [stop - start for start, stop in itertools.pairwise(partition.bounds)]
    assert len(lengths) == replicas and min(lengths) >= 0
    expanded_runs = [(first + i, length) for first, count, length in partition.runs for i in range(count)]
    assert (
        expanded_runs == [(replica, length) for replica, length in enumerate(lengths) if length]
        and len(partition.runs) <= 3
    )
    row = parameter.numel() // parameter.shape[partition.dim]
    if 0 < partition.bounds[1] < parameter.shape[partition.dim]:
        assert all(bound * row % VECTOR == 0 for bound in partition.bounds if bound < parameter.shape[partition.dim])
        unit = VECTOR // math.gcd(VECTOR, row)
        assert max(lengths) - min(lengths) <= 2 * unit - 1, (
            "shards differ by at most one vector, and the last one may be shorter"
        )


@settings(max_examples=150, deadline=None)
@given(parameters(), st.integers(2, 6))
def test_shard_ranges_tile_real_values(parameter, replicas):
    partition, full_shard = partition_of(parameter, replicas), shard_of(parameter)
    shards = [partition.shard(full_shard, replica) for replica in range(replicas)]
    for shard, local in zip(shards, shards_of(partition, parameter.detach()), strict=True):
        assert shard.unpadded(local).shape[partition.dim] == shard.length
        assert 0 <= shard.start <= shard.start + shard.length <= full_shard.global_shape[partition.dim]
    first_idx, real_length = 0, parameter.shape[partition.dim]
    if full_shard.partition_dim == partition.dim:
        first_idx, real_length = full_shard.start, full_shard.length
    shifted = [Shard((real_length,), 0, shard.start - first_idx, shard.length) for shard in shards]
    assert tiling_problem((real_length,), shifted) is None or real_length == 0


def test_tensor_sharded_weight_is_partitioned_along_same_dimension():
    sharded = set_shard(torch.nn.Parameter(torch.zeros(32, 64)), Shard((32, 128), 1, 64, 64))
    assert partition_of(sharded, 2).shard(shard_of(sharded), 1) == Shard((32, 128), 1, 96, 32)
    unsharded = set_shard(torch.nn.Parameter(torch.zeros(32, 128)), Shard((32, 128), 1, 0, 128))
    assert partition_of(unsharded, 2).shard(shard_of(unsharded), 1) == Shard((32, 128), 0, 16, 16), (
        "row slices are contiguous"
    )


def test_small_weight_leaves_some_replicas_without_shard():
    assert partition_of(torch.zeros(20), 4).bounds == (0, 16, 20, 20, 20)
    assert partition_of(torch.zeros(2, 16), 3).bounds == (0, 1, 2, 2)
    assert partition_of(torch.tensor(1.0), 2) is None


def test_columns_without_full_vectors_stay_on_one_replica():
    odd = set_shard(torch.nn.Parameter(torch.zeros(8, 15)), Shard((8, 30), 1, 15, 15))
    assert partition_of(odd, 2).bounds == (0, 15, 15), "the last elements in memory are not those of the last columns"
    even = set_shard(torch.nn.Parameter(torch.zeros(8, 14)), Shard((8, 28), 1, 14, 14))
    assert partition_of(even, 2).bounds == (0, 8, 14)


@settings(max_examples=25, deadline=None)
@given(parameters(), st.integers(2, 4), st.sampled_from([torch.float32, torch.float64]))
def test_fused_adamw_on_shards_is_bitwise_full_update(template, replicas, dtype):
    start, partition = random_tensor(1, *template.shape).to(dtype), partition_of(template, replicas)
    full_weight = torch.nn.Parameter(start.clone())
    shards = [
        torch.nn.Parameter(shard.clone(memory_format=torch.contiguous_format)) for shard in shards_of(partition, start)
    ]
    optimizers = [
        torch.optim.AdamW(params, lr=1e-2, weight_decay=0.1, fused=True) for params in ([full_weight], shards)
    ]
    for step in range(5):
        full_weight.grad = random_tensor(2 + step, *template.shape).to(dtype)
        for shard, gradient in zip(shards, shards_of(partition, full_weight.grad), strict=True):
            shard.grad = gradient.contiguous()
        for optimizer in optimizers:
            optimizer.step()
    assert torch.equal(torch.cat([shard.detach() for shard in shards], partition.dim), full_weight.detach())
