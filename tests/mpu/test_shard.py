"""Where a parameter lies in its global tensor."""

from __future__ import annotations

import torch

from megatron.mpu.groups import Group
from megatron.mpu.layers import VocabParallelEmbedding
from megatron.mpu.shard import Shard, set_shard, shard_of
from tests.helpers.whole import random_tensor

FULL = random_tensor(1, 6, 4)


def test_cut_slices_local_rows_or_columns():
    assert torch.equal(Shard((6, 4), 0, 2, 3).narrow(FULL), FULL[2:5])
    assert torch.equal(Shard((6, 4), 1, 1, 2).narrow(FULL), FULL[:, 1:3])
    assert Shard((6, 4)).narrow(FULL) is FULL


def test_unpadded_excludes_padding_rows():
    shards = [VocabParallelEmbedding(5, 4, group=Group((0, 1, 2, 3), rank)).weight for rank in range(4)]
    assert [tuple(shard_of(w).unpadded(w).shape) for w in shards] == [(2, 4), (2, 4), (1, 4), (0, 4)]
    assert [tuple(shard_of(w).narrow(FULL[:5]).shape) for w in shards] == [(2, 4), (2, 4), (1, 4), (0, 4)]


def test_unpadded_is_a_writable_view():
    local = torch.zeros(4, 4)
    Shard((6, 4), 0, 4, 2).unpadded(local).fill_(1.0)
    assert local.sum(dim=1).tolist() == [4.0, 4.0, 0.0, 0.0]


def test_unmarked_parameter_is_not_partitioned():
    parameter = torch.nn.Parameter(torch.zeros(3, 2))
    assert shard_of(parameter) == Shard((3, 2)) and not shard_of(parameter).is_partitioned


def test_deepspeed_attributes_mark_sharded_parameters():
    sharded = set_shard(torch.nn.Parameter(torch.zeros(2)), Shard((4,), 0, 0, 2))
    replicated = set_shard(torch.nn.Parameter(torch.zeros(4)), Shard((4,)))
    assert (sharded.model_parallel, sharded.tensor_model_parallel) == (True, True)
    assert (replicated.model_parallel, replicated.tensor_model_parallel) == (False, False)
