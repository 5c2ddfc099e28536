"""Over NCCL each route between stages has a channel of its own, opened in one order. Here gloo stands in for it.

The stand-ins: the first operation of a pair in a group holds the host until the other side comes with its own first;
and a group runs what is started on it in order, one message after another.
"""

from __future__ import annotations

import functools
import queue
import threading
from dataclasses import dataclass
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tds.p2p import process_groups
from tds.schedule import MessageType, Placement, V
from tests.helpers.harness import GROUP_TIMEOUT_S, fork_ranks, run_ranks
from tests.helpers.lines import (
    check_equals_one_process,
    make_communicator,
    make_micro_batch,
    order_chunk_by_chunk,
    run_actions,
)
from tests.helpers.toys import Toy, check_equal, make_engine, train_batch

PEER_TIMEOUT_S = 1.5


def _block_first_operation(operation: Any, opened_pairs: set[Any]) -> Any:
    """Let the first ``operation`` of each pair in each group wait for the other side, as NCCL does."""

    @functools.wraps(operation)
    def started(tensor: torch.Tensor, other: int, group: Any = None, tag: int = 0) -> Any:
        rank = dist.get_rank()
        key = f"{group.group_name}/{min(rank, other)}-{max(rank, other)}"
        if tag != int(MessageType.HEADER) and key not in opened_pairs:
            opened_pairs.add(key)
            store = dist.distributed_c10d._get_default_store()
            store.set(f"{key}/{rank}", "here")
            store.wait([f"{key}/{other}"], timedelta(seconds=PEER_TIMEOUT_S))
        return operation(tensor, other, group=group, tag=tag)

    return started


def _train_like_nccl(rank: int, toy: Toy, num_stages: int) -> Any:
    process_groups.TAG_MATCHING_BACKENDS = ()
    opened_pairs: set[Any] = set()
    for name in ("isend", "irecv", "send", "recv"):
        setattr(dist, name, _block_first_operation(getattr(dist, name), opened_pairs))
    engine = make_engine(toy, num_stages)
    num_opened = len(opened_pairs)
    result = train_batch(engine, toy)
    assert len(opened_pairs) == num_opened, (
        "a message opened its channel, for which a host waits in the middle of a step"
    )
    return result


@pytest.mark.parametrize(
    ("ranks", "num_stages"), [*(pytest.param(*case, marks=pytest.mark.slow) for case in ((2, 2), (4, 4))), (4, 2)]
)
def test_blocking_channels_are_opened_before_training(ranks: int, num_stages: int) -> None:
    toy = Toy("many")
    check_equal(run_ranks(ranks, _train_like_nccl, toy, num_stages), toy, ranks // num_stages, tolerance=1e-12)


class _OrderedQueue:
    """One communicator of NCCL: runs what is started on it in order, each message only when the one before is there."""

    def __init__(self) -> None:
        self.todo: queue.Queue[Any] = queue.Queue()
        threading.Thread(target=self._run, daemon=True).start()

    def start(self, operation: Any) -> _FakeWork:
        started = _FakeWork(threading.Event())
        self.todo.put((operation, started))
        return started

    def _run(self) -> None:
        while True:
            operation, started = self.todo.get()
            operation()
            started.done.set()


@dataclass
class _FakeWork:
    done: threading.Event

    def wait(self, timeout: Any = None) -> None:
        if not self.done.wait(PEER_TIMEOUT_S):
            raise RuntimeError("stands still")


def _run_in_order(has_shared_queue: bool) -> None:
    """Let each group, or each pair with all its groups, run its messages in the order in which they are started."""
    queues: dict[Any, _OrderedQueue] = {}
    operations = {"isend": dist.isend, "irecv": dist.irecv}

    def start(name: str, tensor: torch.Tensor, other: int, group: Any = None, tag: int = 0) -> Any:
        if tag == int(MessageType.HEADER):
            return operations[name](tensor, other, group=group, tag=tag)
        key = other if has_shared_queue else group.group_name
        ordered_queue = queues.setdefault(key, _OrderedQueue())
        return ordered_queue.start(lambda: operations[name](tensor, other, group=group, tag=tag).wait())

    for name in operations:
        setattr(dist, name, functools.wraps(operations[name])(functools.partial(start, name)))


def _drive_ring(rank: int, num_chunks: int, inputs: list[torch.Tensor], fake_nccl: str) -> Any:
    process_groups.TAG_MATCHING_BACKENDS = ()
    opened_pairs: set[Any] = set()
    if fake_nccl == "meet first":
        for name in ("isend", "irecv", "send", "recv"):
            setattr(dist, name, _block_first_operation(getattr(dist, name), opened_pairs))
    communicator = make_communicator(num_chunks)
    if fake_nccl != "meet first":
        _run_in_order(fake_nccl == "one queue for a pair")
    return run_actions(communicator, order_chunk_by_chunk(len(inputs), num_chunks), inputs)


@pytest.mark.parametrize("fake_nccl", ["meet first", "one queue for a route"])
@pytest.mark.parametrize(
    ("num_stages", "num_chunks"), [*(pytest.param(*case, marks=pytest.mark.slow) for case in ((2, 2), (3, 2))), (2, 3)]
)
def test_chunk_ring_runs_on_blocking_communicators(num_stages: int, num_chunks: int, fake_nccl: str) -> None:
    inputs = [make_micro_batch(i) for i in range(3)]
    check_equals_one_process(run_ranks(num_stages, _drive_ring, num_chunks, inputs, fake_nccl), inputs, num_chunks)


def test_chunk_ring_deadlocks_with_one_communicator_per_pair() -> None:
    codes, _, reports = fork_ranks(2, _drive_ring, 2, [make_micro_batch(i) for i in range(3)], "one queue for a pair")
    assert 1 in codes and "stands still" in "".join(reports)


def _read_timeouts(rank: int, limit_s: float | None) -> set[timedelta]:
    process_groups.TAG_MATCHING_BACKENDS = ()
    grid = make_engine(Toy("chain"), 2).grid
    limit = None if limit_s is None else timedelta(seconds=limit_s)
    groups, _ = process_groups.message_groups(grid, torch.device("cpu"), Placement(grid.pipe_parallel_size), limit)
    device = torch.device("cpu")
    between_devices = [group for route, group in groups.items() if route[0] is not MessageType.HEADER]
    return {group._get_backend(device).options._timeout for group in between_devices}


@pytest.mark.parametrize("limit_s", [None, 7.0])
def test_message_groups_have_requested_timeout(limit_s: float | None) -> None:
    for timeouts in run_ranks(2, _read_timeouts, limit_s):
        assert timeouts == {timedelta(seconds=limit_s or GROUP_TIMEOUT_S)}


def _read_groups(rank: int, num_chunks: int) -> dict[Any, tuple[list[int], str]]:
    process_groups.TAG_MATCHING_BACKENDS = ()
    groups = make_communicator(num_chunks).links.groups
    return {route: (dist.get_process_group_ranks(group), group.group_name) for route, group in groups.items()}


@pytest.mark.parametrize(("num_stages", "num_chunks"), [(2, 1), (3, 1), (2, 2), (3, 2)])
def test_every_route_has_separate_group(num_stages: int, num_chunks: int) -> None:
    stage_groups = run_ranks(num_stages, _read_groups, num_chunks)
    names: dict[Any, str] = {}
    for stage, groups in enumerate(stage_groups):
        for route, (ranks, name) in groups.items():
            message_type, source, destination = route
            assert stage in (source, destination) and (destination - source) % num_stages in (1, num_stages - 1)
            assert ranks == (
                list(range(num_stages)) if message_type is MessageType.HEADER else sorted([source, destination])
            )
            assert names.setdefault(route, name) == name, "both ends must mean the same group"
    between_devices = [name for route, name in names.items() if route[0] is not MessageType.HEADER]
    pairs = num_stages if num_chunks > 1 else num_stages - 1
    assert len(set(between_devices)) == len(between_devices) == 2 * pairs
    assert set(names) == set(process_groups.routes(Placement(num_stages, num_chunks)))


@dataclass
class _RecordedCalls:
    """Stands in for torch: notes each call in which every rank of the world takes part."""

    splits: list[list[list[int]]]
    new_groups: int = 0
    opened: int = 0
    options: Any = None


def _record_group_creation(
    monkeypatch: pytest.MonkeyPatch, rank: int, grid: Any, placement: Placement
) -> tuple[_RecordedCalls, dict[Any, Any]]:
    """Return what ``rank`` of a world of NCCL calls to make the groups of its messages, and the groups."""
    recorded = _RecordedCalls([])

    def split(ranks: list[list[int]], device: Any, backend: str, options: Any, timeout: Any) -> Any:
        recorded.splits.append(ranks)
        recorded.options = options
        return next((tuple(pair) for pair in ranks if rank in pair), None)

    def new_group(*_: Any, **options: Any) -> str:
        recorded.new_groups += 1
        return "headers"

    api = process_groups.torch_api
    monkeypatch.setattr(api, "split_world", split)
    monkeypatch.setattr(api, "open_world", lambda device: setattr(recorded, "opened", recorded.opened + 1))
    monkeypatch.setattr(api, "nccl_options", lambda max_ctas, timeout: (max_ctas, timeout))
    monkeypatch.setattr(api, "sends_from_host", lambda group: False)
    monkeypatch.setattr(api, "backend", lambda group, device: SimpleNamespace(name=lambda: "nccl"))
    monkeypatch.setattr(process_groups.dist, "new_group", new_group)
    grid.get_global_rank = lambda: rank
    grid.get_stage_id = lambda: next(ranks.index(rank) for ranks in grid.pipe_groups if rank in ranks)
    limit = timedelta(seconds=5)
    groups, must_open = process_groups.message_groups(grid, torch.device("cpu"), placement, limit, 6)
    assert must_open
    return recorded, groups


@pytest.mark.parametrize(
    ("placement", "num_splits"),
    [
        (Placement(8), 4),
        (Placement(8, 2), 4),
        (Placement(7, 2), 6),
        (Placement(2, 2), 4),
        (Placement(2), 2),
        (Placement(8, 2, V), 8),
        (Placement(2, 2, V), 4),
    ],
)
def test_few_world_splits_create_all_message_groups(
    placement: Placement, num_splits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_stages, tensor_ranks, replicas = placement.num_stages, 8, 8
    width = tensor_ranks * replicas
    pipelines = [[stage * width + column for stage in range(num_stages)] for column in range(width)]
    grid = SimpleNamespace(
        pipe_parallel_size=num_stages, pipe_groups=pipelines, get_pipe_parallel_group=lambda: "pipe group"
    )
    first: _RecordedCalls | None = None
    for rank in (0, 100, num_stages * width - 1):
        recorded, groups = _record_group_creation(monkeypatch, rank, grid, placement)
        assert (len(recorded.splits), recorded.new_groups, recorded.opened) == (num_splits, 1, 1)
        assert recorded.options == (6, timedelta(seconds=5) + process_groups.NCCL_GRACE)
        first = first or recorded
        assert recorded.splits == first.splits, "all ranks split alike"
        pipeline = next(ranks for ranks in pipelines if rank in ranks)
        for (message_type, source, destination), group in groups.items():
            ends = tuple(sorted((pipeline[source], pipeline[destination])))
            assert group == ("headers" if message_type is MessageType.HEADER else ends) and (
                message_type is MessageType.HEADER or rank in ends
            )
        local_routes = [route for route in process_groups.routes(placement) if grid.get_stage_id() in route[1:]]
        assert set(groups) == set(local_routes)
    for pairs in recorded.splits:
        ranks = [rank for pair in pairs for rank in pair]
        assert len(set(ranks)) == len(ranks), "the pairs of one split are disjoint"


@pytest.mark.parametrize("has_backend", [True, False], ids=["torch 2.13", "torch 2.11"])
def test_split_world_passes_backend_only_where_torch_accepts_it(
    monkeypatch: pytest.MonkeyPatch, has_backend: bool
) -> None:
    world = SimpleNamespace(bound_device_id=None)
    calls: list[dict[str, Any]] = []

    def split_with_backend(*, split_ranks: Any, timeout: Any, pg_options: Any, backend: str) -> str:
        calls.append({"backend": backend, "ranks": split_ranks, "device": world.bound_device_id})
        return "group"

    def split_without_backend(*, split_ranks: Any, timeout: Any, pg_options: Any) -> str:
        calls.append({"ranks": split_ranks, "device": world.bound_device_id})
        return "group"

    api = process_groups.torch_api
    monkeypatch.setattr(api.distributed_c10d, "_get_default_group", lambda: world)
    monkeypatch.setattr(api.dist, "split_group", split_with_backend if has_backend else split_without_backend)
    device = torch.device("cuda", 1)
    assert api.split_world([[0, 1], [2, 3]], device, "nccl", "options", None) == "group"
    expected = {"ranks": [[0, 1], [2, 3]], "device": device}
    assert calls == [{"backend": "cuda:nccl", **expected} if has_backend else expected]
    assert world.bound_device_id is None


def test_gloo_is_rejected_for_gpu_pipeline() -> None:
    with pytest.raises(ValueError, match="a pipeline on GPUs needs nccl.*got the backend gloo with 2 stages"):
        process_groups.check_backend("gloo", 2, torch.device("cuda", 0))
    process_groups.check_backend("gloo", 1, torch.device("cuda", 0))
    process_groups.check_backend("nccl", 2, torch.device("cuda", 0))


def test_blocking_launches_are_rejected_for_pipeline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    process_groups.check_blocking_launches(1)
    with pytest.raises(ValueError, match="CUDA_LAUNCH_BLOCKING must not be set for a pipeline.*got '1' with 2 stages"):
        process_groups.check_blocking_launches(2)
    for value in ("0", ""):
        monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", value)
        process_groups.check_blocking_launches(2)
