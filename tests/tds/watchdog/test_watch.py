"""When a rank is late, and what it tells of its last operations."""

from __future__ import annotations

import sys
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron import log
from megatron.mpu.mappings import all_reduce
from megatron.runtime import rank_status
from megatron.training import timeouts
from tds.p2p import collective_scope
from tds.watchdog import flight_recorder, thread_stack, watchdog
from tds.watchdog.alarm import Alarms
from tests.helpers.harness import run_ranks
from tests.training.test_phases import SLACK_S, make_world


class _Clock:
    """Time as a test sets it."""

    def __init__(self) -> None:
        self.now = 100.0
        self.sleep = time.sleep
        self.time = time.time

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def dog(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A watch whose threads do not run, with a clock of its own."""
    clock, began = _Clock(), [0.0]
    monkeypatch.setattr(watchdog, "time", clock)
    monkeypatch.setattr(watchdog.threading.Thread, "start", lambda self: None)
    monkeypatch.setattr(flight_recorder, "idle_s", lambda: clock.now - began[0])
    dog: Any = watchdog.RunWatchdog(
        Alarms(dist.HashStore(), 0, ["rank 0"]), "rank 0", lambda: "saving", 10.0, {},
        is_busy=lambda: False, on_stuck=lambda *seen: None, warn=log.warning,
    )  # fmt: skip

    def look(after_s: float) -> bool:
        """Look five times a second, until ``after_s`` have passed; return what was seen last."""
        is_late, end = False, clock.now + after_s
        while clock.now < end:
            clock.now += 0.2
            is_late = dog._is_late()
        return is_late

    dog.look, dog.clock, dog.began = look, clock, began
    return dog


def test_a_rank_is_late_once_nothing_has_changed_for_the_limit(dog: Any) -> None:
    assert not dog.look(9.5) and dog.look(1.5)


@pytest.mark.parametrize("what", ["progress", "collective", "action", "operation"])
def test_a_rank_that_gets_on_is_never_late(what: str, dog: Any) -> None:
    exchange = SimpleNamespace(
        action=None, waiting=None, waits=[], history=[], links=None, action_of_device=lambda: None
    )
    dog.exchange = exchange
    for number in range(4):
        assert not dog.look(8.0), number
        if what == "progress":
            dog.progress += 1
        elif what == "action":
            exchange.action = number
        elif what == "operation":
            dog.began[0] = dog.clock.now
        else:
            with collective_scope.collective_scope(0, "summing"):
                pass
    assert dog.look(12.0)


@pytest.mark.parametrize(("named", "state"), [("rank 0", rank_status.LATE), ("rank 1", "")])
def test_a_rank_that_the_others_waited_for_says_so_to_the_launcher(
    named: str, state: str, dog: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_status, "_page", bytearray(rank_status.SIZE))
    monkeypatch.setattr(timeouts.exit_guard, "leave", lambda *words: None)
    found = f"{named} is missing: it has been saving for 9 s"
    timeouts.leave_stuck(found, dog._report(), None, "rank 0", 10.0)
    assert rank_status.own().state == state


def test_a_process_that_was_itself_stopped_or_starved_is_not_late_for_that(dog: Any) -> None:
    assert not dog.look(5.0)
    dog.clock.now += 60.0
    assert not dog.look(4.0) and dog.look(2.0)


@pytest.mark.parametrize(("stopped_s", "is_reported"), [(60.0, True), (2.0, False)])
def test_stacks_that_a_stop_of_the_whole_process_has_shown_are_explained(
    stopped_s: float, is_reported: bool, dog: Any, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    armed: list[float] = []
    monkeypatch.setattr(watchdog.faulthandler, "dump_traceback_later", lambda limit_s, file: armed.append(limit_s))
    dog._arm()
    dog.clock.now += stopped_s
    dog._arm()
    dog._arm()
    message = "rank 0: the stacks above were written because no thread ran for 60 s: the process was stopped, "
    assert capfd.readouterr().err.count(message) == is_reported and armed == [10.0, 10.0]


def test_a_limit_that_changes_holds_at_once(dog: Any) -> None:
    dog.limit_s = 1000.0
    assert not dog.look(500.0)
    dog.limit_s = 10.0
    assert dog.look(0.2)


def _record(rank: int) -> tuple[str, float, int, str | None]:
    """Return the last operations, with those of a thread in the background left out."""
    here = make_world(rank, 2)
    apart = dist.new_group(backend="gloo")
    all_reduce(torch.ones(2), here.grid.data)
    released = threading.Event()

    def in_background() -> None:
        dist.all_reduce(torch.ones(7), group=apart)
        released.set()
        held.wait(SLACK_S)

    held = threading.Event()
    thread = threading.Thread(target=in_background)
    thread.start()
    released.wait(SLACK_S)
    operations = flight_recorder.format_operations({here.grid.data.handle.group_name: "data"})
    for _ in range(30):
        all_reduce(torch.ones(3), here.grid.data)
    many = flight_recorder.format_operations({})
    held.set()
    thread.join()
    return operations, flight_recorder.idle_s(), many.count("all_reduce"), many


def test_the_last_operations_are_those_of_the_main_thread_with_their_groups() -> None:
    for operations, idle_s, number, many in run_ranks(2, _record):
        assert operations.endswith("all_reduce float[2] (data)") and "float[7]" not in operations
        assert idle_s < SLACK_S
        assert number == 1 and "20 x all_reduce float[3] (default_pg)" in str(many)


def test_a_rank_whose_alarm_is_answered_does_what_it_was_told_to_do_then(dog: Any) -> None:
    calls: list[Any] = []
    dog._on_stuck, dog._is_busy = (lambda *seen: calls.append(seen)), (lambda: True)
    dog._answer(dog._alarms)
    ((found, own, linger),) = calls
    assert found.startswith("no rank is working") and own.is_waiting and linger == dog._alarms.linger


@pytest.mark.parametrize("operation", [None, "all_reduce"])
def test_a_rank_in_a_collective_says_that_it_waits(
    operation: str | None, dog: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the one that waits for longest would be taken for the one that is stuck."""
    monkeypatch.setattr(thread_stack, "communication", lambda frame: operation)
    own = dog._report()
    assert own.is_waiting == (operation is not None) == ("waiting in all_reduce" in own.words)
    assert own.words.startswith("has been saving for 0.0 s")


def test_a_thread_is_seen_where_it_waits_for_an_operation() -> None:
    class Work:
        def wait(self) -> Any:
            return sys._getframe(1)

    work = Work()
    frame = work.wait()
    assert thread_stack.communication(frame) is None, "the line above has been left"
    assert thread_stack.communication(_waiting_frame(work)) == "an operation that it has started"
    assert thread_stack.communication(None) is None and thread_stack.format_stack(None) == ""
    assert thread_stack.format_place(frame).startswith(
        "test_a_thread_is_seen_where_it_waits_for_an_operation (test_watch.py:"
    )


def _waiting_frame(work: Any) -> Any:
    return work.wait()
