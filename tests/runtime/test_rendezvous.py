"""The ranks of a job that is started by hand meet, or say who is there twice, who is missing and who left."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from megatron.errors import JobError, StopRequest, exit_code
from megatron.runtime import rendezvous
from megatron.runtime.exit_signals import StopRequests
from tests.helpers.harness import run_ranks
from tests.helpers.launch_jobs import find_free_port

ProcessPlan = tuple[int, int, float]
"""RANK, WORLD_SIZE, and after how many seconds the process starts."""


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(rendezvous, "_DEAD_AFTER_S", 0.3)
    monkeypatch.setattr(rendezvous, "_LINGER_S", 0.2)
    monkeypatch.setattr(rendezvous, "_HEARTBEAT_S", 0.1)
    monkeypatch.setattr(rendezvous, "_POLL_S", 0.05)
    return find_free_port()


def run_processes(
    plans: list[ProcessPlan],
    port: int,
    timeout_s: float = 20.0,
    before_rendezvous: Callable[[int], None] = lambda _: None,
) -> list[tuple[int, str]]:
    """Start a process for each plan, as by hand; return how the rendezvous ended for each: its exit code and words."""

    def join(process: int) -> tuple[int, str]:
        rank, world_size, delay_s = plans[process]
        time.sleep(delay_s)
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        stop_requests = StopRequests()
        stop_requests.install_handlers()
        before_rendezvous(process)
        try:
            store = rendezvous.rendezvous(
                rank, world_size, timedelta(seconds=timeout_s), lambda: stop_requests.signal_name
            )
            dist.init_process_group(
                "gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=10)
            )
            dist.barrier()
            if rank == 0:
                time.sleep(0.6)  # the store is there for those who come too late
            return 0, ""
        except JobError as error:
            return exit_code(error), str(error)

    results: list[tuple[int, str]] = run_ranks(len(plans), join, init=False)
    return results


@pytest.mark.parametrize(
    "plans",
    [[(0, 2, 0.0), (1, 2, 0.0), (1, 2, 0.3)], [(1, 2, 0.0), (0, 2, 0.1), (1, 2, 0.5)]],
    ids=["rank 0 first", "rank 0 later"],
)
def test_duplicate_rank_is_named_by_later_process_and_others_continue(plans: list[ProcessPlan], port: int) -> None:
    results = run_processes(plans, port)
    assert [code for code, _ in results] == [0, 0, 2]
    message = results[2][1]
    assert f"each process must have a distinct RANK, got RANK=1 twice at 127.0.0.1:{port}: process " in message
    assert "Number the processes from 0 to 1" in message


def test_duplicate_rank_ends_waiting_ranks(port: int) -> None:
    results = run_processes([(0, 3, 0.0), (1, 3, 0.0), (1, 3, 0.2)], port)
    assert [code for code, _ in results] == [4, 4, 2]
    assert all("got RANK=1 twice" in message for _, message in results)


@pytest.mark.slow
def test_duplicate_rank_0_and_other_world_size_are_reported_by_later_process(port: int) -> None:
    results = run_processes([(0, 2, 0.0), (0, 2, 0.2), (1, 4, 0.2), (1, 2, 0.4)], port)
    assert [code for code, _ in results] == [0, 2, 2, 0]
    assert "EADDRINUSE" in results[1][1] and "Another process may have RANK=0" in results[1][1]
    assert "must have the same WORLD_SIZE, got WORLD_SIZE=4 on RANK=1 and 2 on another rank" in results[2][1]


@pytest.mark.slow
def test_process_replaces_killed_waiting_process(port: int) -> None:
    def die(process: int) -> None:
        if process == 1:
            rendezvous._barrier = lambda *_, **__: os.kill(os.getpid(), signal.SIGALRM)  # type: ignore[assignment]
            signal.signal(signal.SIGALRM, lambda *_: (_ for _ in ()).throw(StopRequest("gone")))

    results = run_processes([(0, 2, 0.0), (1, 2, 0.0), (1, 2, 0.2)], port, before_rendezvous=die)
    assert results == [(0, ""), (75, "gone"), (0, "")]


@pytest.mark.parametrize(
    ("plans", "message"),
    [
        ([(0, 5, 0.0), (2, 5, 0.0)], "but ranks 1, 3-4 did not join. Start every process with a distinct RANK"),
        ([(1, 2, 0.0)], "but rank 0 did not join: nothing responds there (Connection refused)"),
    ],
    ids=["some", "rank 0"],
)
def test_missing_ranks_are_reported_by_all_joined_ranks(plans: list[ProcessPlan], message: str, port: int) -> None:
    results = run_processes(plans, port, timeout_s=0.6)
    assert [code for code, _ in results] == [4] * len(plans)
    for _, text in results:
        assert text.startswith(f"all {plans[0][1]} ranks must join at 127.0.0.1:{port} within 1 s (--phase-timeout-min")
        assert message in text and "keys" not in text


@pytest.mark.parametrize("plans", [[(1, 2, 0.0)], [(0, 3, 0.0), (1, 3, 0.0)]], ids=["without rank 0", "with it"])
def test_sigterm_ends_waiting_process_and_its_peers(plans: list[ProcessPlan], port: int) -> None:
    def schedule_sigterm(process: int) -> None:
        if process == len(plans) - 1:
            signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGTERM))
            signal.setitimer(signal.ITIMER_REAL, 0.2)

    start_time = time.monotonic()
    results = run_processes(plans, port, before_rendezvous=schedule_sigterm)
    assert time.monotonic() - start_time < 10.0
    assert results[-1][0] == 75 and results[-1][1].startswith("received SIGTERM while waiting for other ranks")
    for code, message in results[:-1]:
        assert code == 4 and "but rank 1 has exited: it received SIGTERM" in message


def test_rank_that_died_after_join_is_named(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has been counted, but does not answer any more."""
    monkeypatch.setattr(rendezvous, "_START_TIMEOUT_S", 0.3)
    original_barrier = rendezvous._barrier

    def die(process: int) -> None:
        def call_or_die(keys: Any, name: str, *args: Any, **kwargs: Any) -> None:
            if name == "begin":
                raise StopRequest("died")
            original_barrier(keys, name, *args, **kwargs)

        if process == 1:
            rendezvous._barrier = call_or_die  # type: ignore[assignment]

    results = run_processes([(0, 2, 0.0), (1, 2, 0.0)], port, before_rendezvous=die)
    assert results[0][0] == 4 and "rank 1 did not join" in results[0][1] and results[1] == (75, "died")


def test_first_rank_finds_missing_ranks_and_others_read_result(monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.HashStore()
    for rank in (0, 2):
        store.set(f"come/{rank}", "1")
    assert rendezvous.missing_ranks(store, "come/", 4) == [1, 3]
    store.set("come/1", "1")
    assert rendezvous.missing_ranks(store, "come/", 4) == [1, 3]  # as it was when the first one gave up
    monkeypatch.setattr(rendezvous, "_SEARCH_TIMEOUT_S", 0.1)
    lost_store = dist.HashStore()
    lost_store.add("come/looks", 1)  # by one that died over it
    assert rendezvous.missing_ranks(lost_store, "come/", 2) == [0, 1]


def test_store_reserves_open_file_per_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    requested_limits: list[int] = []
    monkeypatch.setattr(rendezvous.files, "allow_open_files", lambda limit: requested_limits.append(limit) or 4096)
    warnings: list[str] = []
    monkeypatch.setattr(rendezvous.log, "warning", warnings.append)
    rendezvous.raise_open_files_limit(8)
    assert not warnings
    rendezvous.raise_open_files_limit(10_000)
    assert requested_limits == [288, 40_256]
    assert len(warnings) == 1 and "40,256 open files" in warnings[0] and "allows only 4,096" in warnings[0]
