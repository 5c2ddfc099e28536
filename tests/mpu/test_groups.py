"""What a group does with any object."""

from __future__ import annotations

import torch.distributed as dist

from megatron.mpu.groups import SINGLE, build_grid
from megatron.mpu.topology import Topology
from tests.helpers.harness import run_ranks


def test_a_group_of_one_sends_nothing() -> None:
    value = object()  # cannot be pickled by value: it comes back itself
    assert not dist.is_initialized()
    assert SINGLE.gather_objects(value) == [value]
    assert SINGLE.broadcast_object(value) is value


def _exchanged(rank: int) -> list[object]:
    grid = build_grid(Topology(pipe=1, data=2, tensor=2), rank)
    mine = {"rank": rank}
    by_hand: list[object] = [None] * 4
    dist.all_gather_object(by_hand, mine)
    assert grid.host.gather_objects(mine) == by_hand
    return [grid.data.gather_objects(mine), grid.data.broadcast_object(mine), grid.tensor.broadcast_object(mine)]


def test_objects_are_gathered_in_rank_order_and_broadcast_by_the_first() -> None:
    for rank, (gathered, of_data, of_tensor) in enumerate(run_ranks(4, _exchanged)):
        own = [rank % 2, rank % 2 + 2]  # the data group: tensor ranks are next to each other
        assert gathered == [{"rank": each} for each in own]
        assert of_data == {"rank": own[0]} and of_tensor == {"rank": rank - rank % 2}
