"""What a group does with any object."""

from __future__ import annotations

import torch.distributed as dist

from megatron.mpu.groups import SINGLE, build_grid
from megatron.mpu.topology import Topology
from tests.helpers.harness import run_ranks


def test_single_rank_group_does_not_communicate() -> None:
    value = object()  # cannot be pickled by value: it comes back itself
    assert not dist.is_initialized()
    assert SINGLE.gather_objects(value) == [value]
    assert SINGLE.broadcast_object(value) is value


def _exchange_objects(rank: int) -> list[object]:
    grid = build_grid(Topology(pipe=1, data=2, tensor=2), rank)
    local_object = {"rank": rank}
    expected: list[object] = [None] * 4
    dist.all_gather_object(expected, local_object)
    assert grid.host.gather_objects(local_object) == expected
    return [
        grid.data.gather_objects(local_object),
        grid.data.broadcast_object(local_object),
        grid.tensor.broadcast_object(local_object),
    ]


def test_objects_gather_in_rank_order_and_broadcast_from_first() -> None:
    for rank, (gathered, from_data, from_tensor) in enumerate(run_ranks(4, _exchange_objects)):
        data_ranks = [rank % 2, rank % 2 + 2]  # the data group: tensor ranks are next to each other
        assert gathered == [{"rank": data_rank} for data_rank in data_ranks]
        assert from_data == {"rank": data_ranks[0]} and from_tensor == {"rank": rank - rank % 2}
