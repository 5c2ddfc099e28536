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
from tds.p2p.communicator import TensorGroup
from tds.p2p.transport import StageLinks, Transport
from tds.schedule import Message, MessageType, Placement
from tests.helpers.harness import GROUP_TIMEOUT_S, fork_ranks, run_ranks

CPU = torch.device("cpu")
CUDA = torch.device("cuda", 0)
WORLD_SIZE = 3
WITHOUT_TENSORS = {"rank", "size", "barrier", "name", "_get_backend", "_start_coalescing", "_end_coalescing"}


def make_copying_group(ranks: list[int] | None = None) -> Any:
    """Return a group of the backend in which all tensors count as a device's."""
    host_copies.register()
    host_copies.is_host = lambda device: False  # type: ignore[assignment]
    return dist.new_group(ranks, backend=host_copies.NAME)


def random_tensor(rank: int, *shape: int, salt: int = 0) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(100 * salt + rank))


def random_tensors(rank: int, salt: int = 0) -> list[torch.Tensor]:
    return [random_tensor(rank, 2, 3, salt=salt + other) for other in range(WORLD_SIZE)]


def empty_tensors() -> list[torch.Tensor]:
    return [torch.full((2, 3), -1.0, dtype=torch.float64) for _ in range(WORLD_SIZE)]


def all_reduces(rank: int, group: Any) -> Iterator[torch.Tensor]:
    op = dist.ReduceOp
    for reduce_op in (op.SUM, op.AVG, op.MAX, op.MIN, op.PRODUCT):
        value = random_tensor(rank, 4, 5)
        dist.all_reduce(value, op=reduce_op, group=group)
        yield value
    tensors = random_tensors(rank)
    dist.all_reduce_coalesced(tensors, group=group)
    yield from tensors


def broadcasts(rank: int, group: Any) -> Iterator[torch.Tensor]:
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.int64, torch.uint8, torch.bool):
        value = (10 * random_tensor(rank, 3)).abs().to(dtype)
        dist.broadcast(value, 1, group=group)
        yield value
    value = random_tensor(rank, 3)
    dist.reduce(value, 2, group=group)
    if rank == 2:  # what others are left with is open
        yield value


def gathers(rank: int, group: Any) -> Iterator[torch.Tensor]:
    gathered, local = empty_tensors(), random_tensor(rank, 2, 3)
    dist.all_gather(gathered, local, group=group)
    yield from [*gathered, local]
    gathered[rank].copy_(random_tensor(rank, 2, 3, salt=1))
    dist.all_gather(gathered, gathered[rank], group=group)  # its own part lies in place
    yield from gathered
    output = torch.empty(2 * WORLD_SIZE, 3, dtype=torch.float64)
    dist.all_gather_into_tensor(output, local, group=group)
    yield output
    gathered = empty_tensors() if rank == 1 else None
    dist.gather(local, gathered, dst=1, group=group)
    yield from gathered or ()


def scatters(rank: int, group: Any) -> Iterator[torch.Tensor]:
    output, inputs = torch.empty(2, 3, dtype=torch.float64), random_tensor(rank, 2 * WORLD_SIZE, 3)
    dist.reduce_scatter(output, random_tensors(rank), group=group)
    yield output.clone()
    dist.reduce_scatter_tensor(output, inputs, group=group)
    yield from (output.clone(), inputs)
    dist.scatter(output, random_tensors(rank) if rank == 1 else None, src=1, group=group)
    yield output.clone()
    swapped = torch.empty_like(inputs)
    dist.all_to_all_single(swapped, inputs, group=group)
    yield swapped


def coalesced(rank: int, group: Any) -> Iterator[torch.Tensor]:
    outs = [torch.empty(2 * WORLD_SIZE, 3, dtype=torch.float64) for _ in range(2)]
    with distributed_c10d._coalescing_manager(group, async_ops=True) as work:
        for salt, out in enumerate(outs):
            dist.all_gather_into_tensor(out, random_tensor(rank, 2, 3, salt=salt), group=group)
    work.wait()
    yield from outs
    ins = [torch.empty(2, 3, dtype=torch.float64) for _ in range(2)]
    with distributed_c10d._coalescing_manager(group):
        for salt, shard in enumerate(ins):
            dist.reduce_scatter_tensor(shard, random_tensor(rank, 2 * WORLD_SIZE, 3, salt=salt), group=group)
    yield from ins


def messages(rank: int, group: Any) -> Iterator[torch.Tensor]:
    """Around the ring, tags in another order than the sends; then one from anybody."""
    next_rank, previous_rank = (rank + 1) % WORLD_SIZE, (rank - 1) % WORLD_SIZE
    received = empty_tensors()
    receives = [dist.irecv(received[tag], previous_rank, group=group, tag=tag) for tag in (0, 1, 2)]
    sends = [dist.isend(random_tensor(rank, 2, 3, salt=tag), next_rank, group=group, tag=tag) for tag in (2, 0, 1)]
    for work in (*receives, *sends):
        work.wait()
    yield from received
    send = dist.P2POp(dist.isend, random_tensor(rank, 2, 3), next_rank, group)
    receive = dist.P2POp(dist.irecv, received[0], previous_rank, group)
    for work in dist.batch_isend_irecv([send, receive]):
        work.wait()
    yield received[0]
    if rank == 0:
        yield torch.tensor(dist.recv(received[1], group=group, tag=7))
        yield received[1]
    elif rank == 2:
        dist.send(random_tensor(rank, 2, 3), 0, group=group, tag=7)


def objects(rank: int, group: Any) -> Iterator[torch.Tensor]:
    gathered: list[Any] = [None] * WORLD_SIZE
    dist.all_gather_object(gathered, {"rank": rank}, group=group)
    broadcast = [rank]
    dist.broadcast_object_list(broadcast, src=2, group=group)
    dist.barrier(group=group)
    yield torch.tensor([*(item["rank"] for item in gathered), *broadcast])


def _run_with_gloo_and_copies(rank: int, operations: Callable[[int, Any], Iterator[torch.Tensor]]) -> tuple[Any, Any]:
    group = make_copying_group()
    return [list(map(torch.clone, operations(rank, process_group))) for process_group in (None, group)]


ALL_OPERATIONS = (all_reduces, broadcasts, gathers, scatters, coalesced, messages, objects)


@pytest.mark.parametrize("operations", ALL_OPERATIONS, ids=lambda operation: operation.__name__)
def test_operations_equal_gloo(operations: Any) -> None:
    for plain, copied in run_ranks(WORLD_SIZE, _run_with_gloo_and_copies, operations):
        assert len(plain) == len(copied)
        for expected, actual in zip(plain, copied, strict=True):
            assert expected.dtype == actual.dtype and torch.equal(expected, actual)


def _reduce_views_and_gather(rank: int) -> Any:
    """Return what one sum makes of every other column, and DeepSpeed's form of several all-gathers."""
    group, value = make_copying_group(), random_tensor(rank, 4, 6)
    dist.all_reduce(value[:, ::2], group=group)
    outs = [torch.empty(2 * WORLD_SIZE, 3, dtype=torch.float64) for _ in range(2)]
    with distributed_c10d._coalescing_manager(group, device=CPU, async_ops=True) as work:
        for salt, out in enumerate(outs):
            dist.all_gather_into_tensor(out, random_tensor(rank, 2, 3, salt=salt), group=group)
    work.wait()
    dist.barrier(group=group, device_ids=[0])
    return value, outs


def test_views_and_coalesced_all_gathers_are_supported() -> None:
    summed = sum(random_tensor(rank, 4, 6) for rank in range(WORLD_SIZE))
    for rank, (value, outs) in enumerate(run_ranks(WORLD_SIZE, _reduce_views_and_gather)):
        torch.testing.assert_close(value[:, ::2], summed[:, ::2])
        assert torch.equal(value[:, 1::2], random_tensor(rank, 4, 6)[:, 1::2]), "what lies between is left alone"
        for salt, out in enumerate(outs):
            assert torch.equal(out, torch.cat([random_tensor(other, 2, 3, salt=salt) for other in range(WORLD_SIZE)]))


def _post_receives_early(rank: int) -> Any:
    """Rank 0 posts two receives, and only then sends what the other waits for ahead of its sends."""
    group = make_copying_group()
    received = [torch.zeros(3), torch.zeros(3)]
    if rank == 1:
        go = torch.zeros(1)
        dist.recv(go, 0, group=group)
        for tag in (1, 0):
            dist.send(torch.full((3,), tag + go.item()), 0, group=group, tag=tag)
        return None
    works = [dist.irecv(received[tag], 1, group=group, tag=tag) for tag in (0, 1)]
    dist.send(torch.full((1,), 10.0), 1, group=group)
    time.sleep(0.3)
    before = [value.tolist() for value in received]
    works[1].wait()
    first = [value.tolist() for value in received]
    received[1].fill_(7.0)
    works[1].wait()  # a second time, as programs do
    works[0].wait()
    return before, first, [value.tolist() for value in received]


def test_early_receives_do_not_block_and_deliver_on_wait() -> None:
    zeros = [0.0] * 3
    before, first, last = run_ranks(2, _post_receives_early)[0]
    assert before == [zeros, zeros]
    assert first == [zeros, [11.0] * 3]
    assert last == [[10.0] * 3, [7.0] * 3]


def _run_async(rank: int) -> Any:
    group = make_copying_group()
    value, leaf = torch.full((3,), 1.0 + rank), torch.full((3,), 1.0 + rank, requires_grad=True)
    work = dist.all_reduce(value, group=group, async_op=True)
    value_before = value.tolist()
    work.wait()
    dist.broadcast(leaf, 1, group=group)
    sent = torch.zeros(3)
    work = dist.isend(sent, 1 - rank, group=group, tag=3)
    sent.fill_(9.0)  # its copy is on the way
    dist.recv(received := torch.ones(3), 1 - rank, group=group, tag=3)
    work.wait()
    return value_before, value.tolist(), value._version, leaf.tolist(), received.tolist()


def test_pending_all_reduce_leaves_tensor_unchanged() -> None:
    for rank, result in enumerate(run_ranks(2, _run_async)):
        assert result == ([1.0 + rank] * 3, [3.0] * 3, 0, [2.0] * 3, [0.0] * 3)


def _survive_dead_rank(rank: int, uses_copies: bool) -> str:
    group = make_copying_group() if uses_copies else dist.new_group()
    dist.all_reduce(torch.ones(1), group=group)
    if rank == 1:
        os._exit(9)
    try:
        dist.all_reduce(torch.ones(1), group=group)
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def test_dead_rank_raises_gloo_error() -> None:
    for uses_copies in (False, True):
        codes, results, reports = fork_ranks(2, _survive_dead_rank, uses_copies)
        message = results[0] or reports[0]
        assert codes[1] == 9 and "RuntimeError" in message
        assert re.search("Connection (closed|reset) by peer", message), message


def _read_timeouts(rank: int) -> Any:
    group = make_copying_group()
    process_groups.set_group_timeouts([group], timedelta(seconds=7))
    timeouts = [group._get_backend(device).options._timeout for device in (CPU, CUDA)]
    distributed_c10d._update_default_pg(group)
    return timeouts, torch_api.default_timeout(), dist.get_backend(group), group._get_backend(CUDA).name()


def test_timeout_is_set_and_read_like_gloo() -> None:
    seven = timedelta(seconds=7)
    assert run_ranks(2, _read_timeouts) == [([seven, seven], seven, host_copies.NAME, "gloo")] * 2


def _receive_missing_message(rank: int) -> str:
    communicator.is_host = lambda device: False  # type: ignore[assignment]
    route = (MessageType.ACTIVATION, 0, 1)
    links = StageLinks(rank, [0, 1], {route: make_copying_group()}, TensorGroup(), CPU, timedelta(seconds=0.3))
    if rank == 1:
        transport = Transport(links)
        transfer = transport.receive(MessageType.ACTIVATION, Message(MessageType.ACTIVATION, 0, 0, 0), torch.zeros(2))
        try:
            transport.wait_for(transfer)
        except PeerLost as error:
            return str(error)
    return ""


def test_missing_host_message_times_out() -> None:
    begin = time.monotonic()
    message = run_ranks(2, _receive_missing_message)[1]
    assert "stage 1 lost stage 0 (rank 0) while receiving the activation" in message
    assert time.monotonic() - begin < GROUP_TIMEOUT_S


def _make_message_groups(rank: int, name: str) -> Any:
    host_copies.register()
    group = dist.new_group(backend=name)
    grid = SimpleNamespace(
        get_pipe_parallel_group=lambda: group, get_stage_id=lambda: rank, pipe_parallel_size=2, pipe_groups=[[0, 1]]
    )
    process_groups.runs_collectives_on_host = lambda: False  # type: ignore[assignment]
    try:
        groups, must_open = process_groups.message_groups(grid, CUDA, Placement(grid.pipe_parallel_size))
    except ValueError as error:
        return str(error)
    return {message_group is group for message_group in groups.values()}, must_open


def test_gpu_stages_use_copying_group_and_reject_gloo() -> None:
    assert run_ranks(2, _make_message_groups, host_copies.NAME) == [({True}, False)] * 2
    for message in run_ranks(2, _make_message_groups, "gloo"):
        assert "tds.p2p.host_copies.register()" in message and 'init_distributed(dist_backend="host_copies")' in message


def _collect_warnings(rank: int) -> list[str]:
    log_lines: list[str] = []
    logging.getLogger("tds").addHandler(handler := logging.Handler())
    handler.emit = lambda record: log_lines.append(record.getMessage())  # type: ignore[method-assign]
    group = make_copying_group()
    for _ in range(2):
        dist.all_reduce(torch.ones(1), group=group)
    return log_lines


def test_host_copies_warns_once_about_speed() -> None:
    message = "cpu tensors are copied through the host and sent by gloo (host_copies): slow, for tests of results"
    assert run_ranks(2, _collect_warnings) == [[message], []]


def test_all_process_group_methods_are_covered() -> None:
    called = set(re.findall(r"\bgroup\.([a-z_0-9]+)\(", inspect.getsource(distributed_c10d)))
    assert {"allreduce", "broadcast", "send", "recv", "allgather"} <= called - WITHOUT_TENSORS
    assert called - WITHOUT_TENSORS <= set(host_copies.OPERATIONS)
    for name in host_copies.OPERATIONS.keys() & called:
        assert hasattr(dist.ProcessGroup, name), name
