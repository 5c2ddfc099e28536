"""Groups that send tensors of a device by copies in the host's memory do what gloo does with tensors of the host.

Here the tensors of a device are the host's own: the module is told that nothing lies on the host.
"""

from __future__ import annotations

import inspect
import logging
import os
import re
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from tds import torch_api
from tds.p2p import communicator, host_copies, process_groups
from tds.p2p.collective_scope import PeerLost
from tds.p2p.communicator import Slice
from tds.p2p.transport import StageLinks, Transport
from tds.schedule import Kind, Message, Placement
from tests.helpers.harness import GROUP_TIMEOUT_S, fork_ranks, run_ranks

CPU = torch.device("cpu")
CUDA = torch.device("cuda", 0)
SIZE = 3
WITHOUT_TENSORS = {"rank", "size", "barrier", "name", "_get_backend", "_start_coalescing", "_end_coalescing"}


def copying_group(ranks: list[int] | None = None) -> Any:
    """Return a group of the backend in which all tensors count as a device's."""
    host_copies.register()
    host_copies.is_host = lambda device: False  # type: ignore[assignment]
    return dist.new_group(ranks, backend=host_copies.NAME)


def numbers(rank: int, *shape: int, salt: int = 0) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(100 * salt + rank))


def parts(rank: int, salt: int = 0) -> list[torch.Tensor]:
    return [numbers(rank, 2, 3, salt=salt + other) for other in range(SIZE)]


def empties() -> list[torch.Tensor]:
    return [torch.full((2, 3), -1.0, dtype=torch.float64) for _ in range(SIZE)]


def all_reduces(rank: int, group: Any) -> Iterator[torch.Tensor]:
    op = dist.ReduceOp
    for one in (op.SUM, op.AVG, op.MAX, op.MIN, op.PRODUCT):
        value = numbers(rank, 4, 5)
        dist.all_reduce(value, op=one, group=group)
        yield value
    several = parts(rank)
    dist.all_reduce_coalesced(several, group=group)
    yield from several


def broadcasts(rank: int, group: Any) -> Iterator[torch.Tensor]:
    for kind in (torch.bfloat16, torch.float16, torch.float32, torch.int64, torch.uint8, torch.bool):
        value = (10 * numbers(rank, 3)).abs().to(kind)
        dist.broadcast(value, 1, group=group)
        yield value
    value = numbers(rank, 3)
    dist.reduce(value, 2, group=group)
    if rank == 2:  # what others are left with is open
        yield value


def gathers(rank: int, group: Any) -> Iterator[torch.Tensor]:
    found, mine = empties(), numbers(rank, 2, 3)
    dist.all_gather(found, mine, group=group)
    yield from [*found, mine]
    found[rank].copy_(numbers(rank, 2, 3, salt=1))
    dist.all_gather(found, found[rank], group=group)  # its own part lies in place
    yield from found
    whole = torch.empty(2 * SIZE, 3, dtype=torch.float64)
    dist.all_gather_into_tensor(whole, mine, group=group)
    yield whole
    found = empties() if rank == 1 else None
    dist.gather(mine, found, dst=1, group=group)
    yield from found or ()


def scatters(rank: int, group: Any) -> Iterator[torch.Tensor]:
    part, whole = torch.empty(2, 3, dtype=torch.float64), numbers(rank, 2 * SIZE, 3)
    dist.reduce_scatter(part, parts(rank), group=group)
    yield part.clone()
    dist.reduce_scatter_tensor(part, whole, group=group)
    yield from (part.clone(), whole)
    dist.scatter(part, parts(rank) if rank == 1 else None, src=1, group=group)
    yield part.clone()
    swapped = torch.empty_like(whole)
    dist.all_to_all_single(swapped, whole, group=group)
    yield swapped


def coalesced(rank: int, group: Any) -> Iterator[torch.Tensor]:
    outs = [torch.empty(2 * SIZE, 3, dtype=torch.float64) for _ in range(2)]
    with distributed_c10d._coalescing_manager(group, async_ops=True) as gathers:
        for salt, out in enumerate(outs):
            dist.all_gather_into_tensor(out, numbers(rank, 2, 3, salt=salt), group=group)
    gathers.wait()
    yield from outs
    ins = [torch.empty(2, 3, dtype=torch.float64) for _ in range(2)]
    with distributed_c10d._coalescing_manager(group):
        for salt, part in enumerate(ins):
            dist.reduce_scatter_tensor(part, numbers(rank, 2 * SIZE, 3, salt=salt), group=group)
    yield from ins


def messages(rank: int, group: Any) -> Iterator[torch.Tensor]:
    """Around the ring, tags in another order than the sends; then one from anybody."""
    ahead, behind = (rank + 1) % SIZE, (rank - 1) % SIZE
    found = empties()
    receives = [dist.irecv(found[tag], behind, group=group, tag=tag) for tag in (0, 1, 2)]
    sends = [dist.isend(numbers(rank, 2, 3, salt=tag), ahead, group=group, tag=tag) for tag in (2, 0, 1)]
    for work in (*receives, *sends):
        work.wait()
    yield from found
    goes = dist.P2POp(dist.isend, numbers(rank, 2, 3), ahead, group)
    comes = dist.P2POp(dist.irecv, found[0], behind, group)
    for work in dist.batch_isend_irecv([goes, comes]):
        work.wait()
    yield found[0]
    if rank == 0:
        yield torch.tensor(dist.recv(found[1], group=group, tag=7))
        yield found[1]
    elif rank == 2:
        dist.send(numbers(rank, 2, 3), 0, group=group, tag=7)


def objects(rank: int, group: Any) -> Iterator[torch.Tensor]:
    gathered: list[Any] = [None] * SIZE
    dist.all_gather_object(gathered, {"rank": rank}, group=group)
    said = [rank]
    dist.broadcast_object_list(said, src=2, group=group)
    dist.barrier(group=group)
    yield torch.tensor([*(one["rank"] for one in gathered), *said])


def _results(rank: int, operations: Callable[[int, Any], Iterator[torch.Tensor]]) -> tuple[Any, Any]:
    group = copying_group()
    return [list(map(torch.clone, operations(rank, which))) for which in (None, group)]


OF_THEM_ALL = (all_reduces, broadcasts, gathers, scatters, coalesced, messages, objects)


@pytest.mark.parametrize("operations", OF_THEM_ALL, ids=lambda each: each.__name__)
def test_every_operation_gives_what_gloo_gives(operations: Any) -> None:
    for plain, copied in run_ranks(SIZE, _results, operations):
        assert len(plain) == len(copied)
        for one, other in zip(plain, copied, strict=True):
            assert one.dtype == other.dtype and torch.equal(one, other)


def _views(rank: int) -> Any:
    """Return what one sum makes of every other column, and DeepSpeed's form of several all-gathers."""
    group, value = copying_group(), numbers(rank, 4, 6)
    dist.all_reduce(value[:, ::2], group=group)
    outs = [torch.empty(2 * SIZE, 3, dtype=torch.float64) for _ in range(2)]
    with distributed_c10d._coalescing_manager(group, device=CPU, async_ops=True) as gathers:
        for salt, out in enumerate(outs):
            dist.all_gather_into_tensor(out, numbers(rank, 2, 3, salt=salt), group=group)
    gathers.wait()
    dist.barrier(group=group, device_ids=[0])
    return value, outs


def test_views_and_all_gathers_in_one_go_are_done_though_gloo_alone_would_not() -> None:
    summed = sum(numbers(rank, 4, 6) for rank in range(SIZE))
    for rank, (value, outs) in enumerate(run_ranks(SIZE, _views)):
        torch.testing.assert_close(value[:, ::2], summed[:, ::2])
        assert torch.equal(value[:, 1::2], numbers(rank, 4, 6)[:, 1::2]), "what lies between is left alone"
        for salt, out in enumerate(outs):
            assert torch.equal(out, torch.cat([numbers(other, 2, 3, salt=salt) for other in range(SIZE)]))


def _ahead(rank: int) -> Any:
    """Rank 0 posts two receives, and only then sends what the other waits for ahead of its sends."""
    group = copying_group()
    found = [torch.zeros(3), torch.zeros(3)]
    if rank == 1:
        go = torch.zeros(1)
        dist.recv(go, 0, group=group)
        for tag in (1, 0):
            dist.send(torch.full((3,), tag + go.item()), 0, group=group, tag=tag)
        return None
    works = [dist.irecv(found[tag], 1, group=group, tag=tag) for tag in (0, 1)]
    dist.send(torch.full((1,), 10.0), 1, group=group)
    time.sleep(0.3)
    before = [value.tolist() for value in found]
    works[1].wait()
    first = [value.tolist() for value in found]
    found[1].fill_(7.0)
    works[1].wait()  # a second time, as programs do
    works[0].wait()
    return before, first, [value.tolist() for value in found]


def test_receives_posted_ahead_do_not_hold_the_host_and_bring_their_bytes_when_they_are_waited_for() -> None:
    zeros = [0.0] * 3
    before, first, last = run_ranks(2, _ahead)[0]
    assert before == [zeros, zeros]
    assert first == [zeros, [11.0] * 3]
    assert last == [[10.0] * 3, [7.0] * 3]


def _async(rank: int) -> Any:
    group = copying_group()
    value, leaf = torch.full((3,), 1.0 + rank), torch.full((3,), 1.0 + rank, requires_grad=True)
    work = dist.all_reduce(value, group=group, async_op=True)
    value_then = value.tolist()
    work.wait()
    dist.broadcast(leaf, 1, group=group)
    sent = torch.zeros(3)
    work = dist.isend(sent, 1 - rank, group=group, tag=3)
    sent.fill_(9.0)  # its copy is on the way
    dist.recv(came := torch.ones(3), 1 - rank, group=group, tag=3)
    work.wait()
    return value_then, value.tolist(), value._version, leaf.tolist(), came.tolist()


def test_a_sum_on_its_way_leaves_the_tensor_alone_and_counts_no_change_in_place() -> None:
    for rank, found in enumerate(run_ranks(2, _async)):
        assert found == ([1.0 + rank] * 3, [3.0] * 3, 0, [2.0] * 3, [0.0] * 3)


def _alone(rank: int, copies: bool) -> str:
    group = copying_group() if copies else dist.new_group()
    dist.all_reduce(torch.ones(1), group=group)
    if rank == 1:
        os._exit(9)
    try:
        dist.all_reduce(torch.ones(1), group=group)
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def test_a_rank_that_dies_is_told_in_the_words_of_gloo() -> None:
    for copies in (False, True):
        codes, results, reports = fork_ranks(2, _alone, copies)
        message = results[0] or reports[0]
        assert codes[1] == 9 and "RuntimeError" in message
        assert re.search("Connection (closed|reset) by peer", message), message


def _limits(rank: int) -> Any:
    group = copying_group()
    process_groups.limit_groups([group], timedelta(seconds=7))
    found = [group._get_backend(place).options._timeout for place in (CPU, CUDA)]
    distributed_c10d._update_default_pg(group)
    return found, torch_api.default_timeout(), dist.get_backend(group), group._get_backend(CUDA).name()


def test_its_time_limit_is_set_and_read_as_gloos() -> None:
    seven = timedelta(seconds=7)
    assert run_ranks(2, _limits) == [([seven, seven], seven, host_copies.NAME, "gloo")] * 2


def _late(rank: int) -> str:
    communicator.is_host = lambda device: False  # type: ignore[assignment]
    route = (Kind.ACTIVATION, 0, 1)
    links = StageLinks(rank, [0, 1], {route: copying_group()}, Slice(), CPU, timedelta(seconds=0.3))
    if rank == 1:
        own = Transport(links)
        transfer = own.receive(Kind.ACTIVATION, Message(Kind.ACTIVATION, 0, 0, 0), torch.zeros(2))
        try:
            own.wait_for(transfer)
        except PeerLost as error:
            return str(error)
    return ""


def test_a_message_through_the_host_that_does_not_come_is_waited_for_as_long_as_the_limit_says() -> None:
    begin = time.monotonic()
    message = run_ranks(2, _late)[1]
    assert "stage 1 lost stage 0 (rank 0) while receiving the activation" in message
    assert time.monotonic() - begin < GROUP_TIMEOUT_S


def _of_stages(rank: int, name: str) -> Any:
    host_copies.register()
    group = dist.new_group(backend=name)
    grid = SimpleNamespace(
        get_pipe_parallel_group=lambda: group, get_stage_id=lambda: rank, pipe_parallel_size=2, pipe_groups=[[0, 1]]
    )
    process_groups.sends_over_host = lambda: False  # type: ignore[assignment]
    try:
        groups, must_open = process_groups.message_groups(grid, CUDA, Placement(grid.pipe_parallel_size))
    except ValueError as error:
        return str(error)
    return {each is group for each in groups.values()}, must_open


def test_stages_on_gpus_send_in_a_group_that_copies_and_are_told_of_it_where_gloo_is_alone() -> None:
    assert run_ranks(2, _of_stages, host_copies.NAME) == [({True}, False)] * 2
    for message in run_ranks(2, _of_stages, "gloo"):
        assert "tds.p2p.host_copies.register()" in message and 'init_distributed(dist_backend="host_copies")' in message


def _heard(rank: int) -> list[str]:
    heard: list[str] = []
    logging.getLogger("tds").addHandler(handler := logging.Handler())
    handler.emit = lambda record: heard.append(record.getMessage())  # type: ignore[method-assign]
    group = copying_group()
    for _ in range(2):
        dist.all_reduce(torch.ones(1), group=group)
    return heard


def test_it_says_once_in_a_job_that_it_is_not_for_speed() -> None:
    message = "cpu tensors are copied through the host and sent by gloo (host_copies): slow, for tests of results"
    assert run_ranks(2, _heard) == [[message], []]


def test_each_method_of_a_group_that_torch_gives_tensors_is_known() -> None:
    called = set(re.findall(r"\bgroup\.([a-z_0-9]+)\(", inspect.getsource(distributed_c10d)))
    assert {"allreduce", "broadcast", "send", "recv", "allgather"} <= called - WITHOUT_TENSORS
    assert called - WITHOUT_TENSORS <= set(host_copies.OPERATIONS)
    for name in host_copies.OPERATIONS.keys() & called:
        assert hasattr(dist.ProcessGroup, name), name
