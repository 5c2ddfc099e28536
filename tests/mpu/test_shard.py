"""Where a parameter lies in its global tensor."""

from __future__ import annotations

import torch

from megatron.mpu.groups import Group
from megatron.mpu.layers import VocabParallelEmbedding
from megatron.mpu.shard import Shard, set_shard, shard_of
from tests.helpers.whole import random

WHOLE = random(1, 6, 4)


def test_cut_takes_the_own_rows_or_columns():
    assert torch.equal(Shard((6, 4), 0, 2, 3).cut(WHOLE), WHOLE[2:5])
    assert torch.equal(Shard((6, 4), 1, 1, 2).cut(WHOLE), WHOLE[:, 1:3])
    assert Shard((6, 4)).cut(WHOLE) is WHOLE


def test_unpadded_leaves_out_the_rows_that_belong_to_nobody():
    shards = [VocabParallelEmbedding(5, 4, group=Group((0, 1, 2, 3), rank)).weight for rank in range(4)]
    assert [tuple(shard_of(w).unpadded(w).shape) for w in shards] == [(2, 4), (2, 4), (1, 4), (0, 4)]
    assert [tuple(shard_of(w).cut(WHOLE[:5]).shape) for w in shards] == [(2, 4), (2, 4), (1, 4), (0, 4)]


def test_unpadded_is_a_view_so_that_writing_to_it_fills_the_parameter():
    local = torch.zeros(4, 4)
    Shard((6, 4), 0, 4, 2).unpadded(local).fill_(1.0)
    assert local.sum(dim=1).tolist() == [4.0, 4.0, 0.0, 0.0]


def test_a_parameter_that_no_layer_marked_is_held_whole():
    parameter = torch.nn.Parameter(torch.zeros(3, 2))
    assert shard_of(parameter) == Shard((3, 2)) and not shard_of(parameter).is_partitioned


def test_deepspeed_finds_the_names_it_reads():
    cut = set_shard(torch.nn.Parameter(torch.zeros(2)), Shard((4,), 0, 0, 2))
    whole = set_shard(torch.nn.Parameter(torch.zeros(4)), Shard((4,)))
    assert (cut.model_parallel, cut.tensor_model_parallel) == (True, True)
    assert (whole.model_parallel, whole.tensor_model_parallel) == (False, False)
