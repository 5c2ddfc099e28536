"""What a group does with any object."""

from __future__ import annotations

import threading

import torch
import torch.distributed as dist

from megatron.mpu.groups import SINGLE, Handles, PairedGroup, build_grid, handles_of
from megatron.mpu.topology import Topology
from tds.gradients import let_run_beside_backward
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


def _sums_of_two_threads(rank: int) -> list[object]:
    """Return what ranks add up in two threads, which call in another order on each rank."""
    grid = build_grid(Topology(pipe=2, data=1, tensor=2), rank, has_pairs=True)
    found: dict[bool, float] = {}

    def add(is_beside: bool) -> None:
        if is_beside:
            let_run_beside_backward()
        x = torch.tensor([10.0 * is_beside + rank], dtype=torch.float64)
        dist.all_reduce(x, group=grid.tensor.handle)
        found[is_beside] = x.item()

    threads = [threading.Thread(target=add, args=(is_beside,)) for is_beside in (False, True)]
    for thread in threads[:: 1 if rank % 2 else -1]:
        thread.start()
        thread.join(0.05)  # it waits for the other rank
    for thread in threads:
        thread.join(10)
    return [found[False], found[True], *(len(handles_of(group)) for group in (grid.tensor, grid.pipe, grid.world))]


def test_two_threads_of_a_stage_add_up_in_any_order() -> None:
    for rank, found in enumerate(run_ranks(4, _sums_of_two_threads)):
        stage = rank // 2 * 2
        assert found == [2.0 * stage + 1, 20.0 + 2 * stage + 1, 2, 1, 1]


def test_a_group_of_pairs_has_the_handle_of_the_thread_that_asks() -> None:
    group, seen = PairedGroup((4, 5), 1, Handles("in turn", "beside")), []

    def ask() -> None:
        let_run_beside_backward()
        seen.append(group.handle)

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join()
    assert (group.handle, *seen, group.size, group.rank) == ("in turn", "beside", 2, 1)
    assert handles_of(group) == ["in turn", "beside"] and handles_of(SINGLE) == []
