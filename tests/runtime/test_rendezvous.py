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
from tests.helpers.launch_jobs import free_port

Plan = tuple[int, int, float]
"""RANK, WORLD_SIZE, and after how many seconds the process starts."""


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(rendezvous, "_DEAD_S", 0.3)
    monkeypatch.setattr(rendezvous, "_LINGER_S", 0.2)
    monkeypatch.setattr(rendezvous, "_HEARTBEAT_S", 0.1)
    monkeypatch.setattr(rendezvous, "_POLL_S", 0.05)
    return free_port()


def start(
    plans: list[Plan], port: int, timeout_s: float = 20.0, act: Callable[[int], None] = lambda _: None
) -> list[tuple[int, str]]:
    """Start a process for each plan, as by hand; return how the rendezvous ended for each: its exit code and words."""

    def meet(process: int) -> tuple[int, str]:
        rank, size, after = plans[process]
        time.sleep(after)
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        stop = StopRequests()
        stop.listen()
        act(process)
        try:
            store = rendezvous.rendezvous(rank, size, timedelta(seconds=timeout_s), lambda: stop.signal_name)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=10))
            dist.barrier()
            if rank == 0:
                time.sleep(0.6)  # the store is there for those who come too late
            return 0, ""
        except JobError as error:
            return exit_code(error), str(error)

    found: list[tuple[int, str]] = run_ranks(len(plans), meet, init=False)
    return found


@pytest.mark.parametrize(
    "plans",
    [[(0, 2, 0.0), (1, 2, 0.0), (1, 2, 0.3)], [(1, 2, 0.0), (0, 2, 0.1), (1, 2, 0.5)]],
    ids=["rank 0 first", "rank 0 later"],
)
def test_a_rank_that_is_there_twice_is_named_by_the_later_one_and_the_others_go_on(
    plans: list[Plan], port: int
) -> None:
    ends = start(plans, port)
    assert [code for code, _ in ends] == [0, 0, 2]
    message = ends[2][1]
    assert f"each process must have a distinct RANK, got RANK=1 twice at 127.0.0.1:{port}: process " in message
    assert "Number the processes from 0 to 1" in message


def test_a_rank_that_is_there_twice_ends_those_that_wait_for_another(port: int) -> None:
    ends = start([(0, 3, 0.0), (1, 3, 0.0), (1, 3, 0.2)], port)
    assert [code for code, _ in ends] == [4, 4, 2]
    assert all("got RANK=1 twice" in message for _, message in ends)


@pytest.mark.slow
def test_rank_0_twice_and_another_world_size_are_told_by_the_later_one(port: int) -> None:
    ends = start([(0, 2, 0.0), (0, 2, 0.2), (1, 4, 0.2), (1, 2, 0.4)], port)
    assert [code for code, _ in ends] == [0, 2, 2, 0]
    assert "EADDRINUSE" in ends[1][1] and "Another process may have RANK=0" in ends[1][1]
    assert "must have the same WORLD_SIZE, got WORLD_SIZE=4 on RANK=1 and 2 on another rank" in ends[2][1]


@pytest.mark.slow
def test_a_process_takes_the_place_of_one_that_was_killed_while_it_waited(port: int) -> None:
    def die(process: int) -> None:
        if process == 1:
            rendezvous._barrier = lambda *_, **__: os.kill(os.getpid(), signal.SIGALRM)  # type: ignore[assignment]
            signal.signal(signal.SIGALRM, lambda *_: (_ for _ in ()).throw(StopRequest("gone")))

    ends = start([(0, 2, 0.0), (1, 2, 0.0), (1, 2, 0.2)], port, act=die)
    assert ends == [(0, ""), (75, "gone"), (0, "")]


@pytest.mark.parametrize(
    ("plans", "message"),
    [
        ([(0, 5, 0.0), (2, 5, 0.0)], "but ranks 1, 3-4 did not join. Start every process with a distinct RANK"),
        ([(1, 2, 0.0)], "but rank 0 did not join: nothing responds there (Connection refused)"),
    ],
    ids=["some", "rank 0"],
)
def test_who_is_missing_is_said_by_rank_by_all_that_came(plans: list[Plan], message: str, port: int) -> None:
    ends = start(plans, port, timeout_s=0.6)
    assert [code for code, _ in ends] == [4] * len(plans)
    for _, text in ends:
        assert text.startswith(f"all {plans[0][1]} ranks must join at 127.0.0.1:{port} within 1 s (--phase-timeout-min")
        assert message in text and "keys" not in text


@pytest.mark.parametrize("plans", [[(1, 2, 0.0)], [(0, 3, 0.0), (1, 3, 0.0)]], ids=["without rank 0", "with it"])
def test_sigterm_ends_a_process_that_waits_for_others_and_those_with_it(plans: list[Plan], port: int) -> None:
    def ask(process: int) -> None:
        if process == len(plans) - 1:
            signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGTERM))
            signal.setitimer(signal.ITIMER_REAL, 0.2)

    began = time.monotonic()
    ends = start(plans, port, act=ask)
    assert time.monotonic() - began < 10.0
    assert ends[-1][0] == 75 and ends[-1][1].startswith("received SIGTERM while waiting for other ranks")
    for code, message in ends[:-1]:
        assert code == 4 and "but rank 1 has exited: it received SIGTERM" in message


def test_a_rank_that_died_after_all_had_come_is_named(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has been counted, but does not answer any more."""
    monkeypatch.setattr(rendezvous, "_BEGIN_S", 0.3)
    call = rendezvous._barrier

    def die(process: int) -> None:
        def call_or_die(keys: Any, name: str, *rest: Any, **more: Any) -> None:
            if name == "begin":
                raise StopRequest("died")
            call(keys, name, *rest, **more)

        if process == 1:
            rendezvous._barrier = call_or_die  # type: ignore[assignment]

    ends = start([(0, 2, 0.0), (1, 2, 0.0)], port, act=die)
    assert ends[0][0] == 4 and "rank 1 did not come" in ends[0][1] and ends[1] == (75, "died")


def test_one_looks_who_is_missing_and_the_others_read_what_it_found(monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.HashStore()
    for rank in (0, 2):
        store.set(f"come/{rank}", "1")
    assert rendezvous.missing_of(store, "come/", 4) == [1, 3]
    store.set("come/1", "1")
    assert rendezvous.missing_of(store, "come/", 4) == [1, 3]  # as it was when the first one gave up
    monkeypatch.setattr(rendezvous, "_LOOK_S", 0.1)
    lost = dist.HashStore()
    lost.add("come/looks", 1)  # by one that died over it
    assert rendezvous.missing_of(lost, "come/", 2) == [0, 1]


def test_the_store_of_many_ranks_is_let_have_a_connection_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(rendezvous.files, "allow_open_files", lambda number: asked.append(number) or 4096)
    warned: list[str] = []
    monkeypatch.setattr(rendezvous.log, "warning", warned.append)
    rendezvous.make_room(8)
    assert not warned
    rendezvous.make_room(10_000)
    assert asked == [288, 40_256]
    assert len(warned) == 1 and "40,256 open files" in warned[0] and "have 4,096" in warned[0]
