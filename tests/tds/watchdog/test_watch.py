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


class _FakeClock:
    """Time as a test sets it."""

    def __init__(self) -> None:
        self.now = 100.0
        self.sleep = time.sleep
        self.time = time.time

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def run_watchdog(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A watch whose threads do not run, with a clock of its own."""
    clock, operation_start = _FakeClock(), [0.0]
    monkeypatch.setattr(watchdog, "time", clock)
    monkeypatch.setattr(watchdog.threading.Thread, "start", lambda self: None)
    monkeypatch.setattr(flight_recorder, "idle_s", lambda: clock.now - operation_start[0])
    run_watchdog: Any = watchdog.RunWatchdog(
        Alarms(dist.HashStore(), 0, ["rank 0"]), "rank 0", lambda: "saving", 10.0, {},
        is_busy=lambda: False, on_stuck=lambda *seen: None, warn=log.warning,
    )  # fmt: skip

    def advance(after_s: float) -> bool:
        """Look five times a second, until ``after_s`` have passed; return what was seen last."""
        is_late, end = False, clock.now + after_s
        while clock.now < end:
            clock.now += 0.2
            is_late = run_watchdog._is_late()
        return is_late

    run_watchdog.look, run_watchdog.clock, run_watchdog.began = advance, clock, operation_start
    return run_watchdog


def test_rank_is_late_after_limit_without_change(run_watchdog: Any) -> None:
    assert not run_watchdog.look(9.5) and run_watchdog.look(1.5)


@pytest.mark.parametrize("progress_type", ["progress", "collective", "action", "operation"])
def test_progressing_rank_is_never_late(progress_type: str, run_watchdog: Any) -> None:
    communicator = SimpleNamespace(
        action=None, waiting=None, waits=[], history=[], links=None, device_action=lambda: None
    )
    run_watchdog.communicator = communicator
    for step in range(4):
        assert not run_watchdog.look(8.0), step
        if progress_type == "progress":
            run_watchdog.progress += 1
        elif progress_type == "action":
            communicator.action = step
        elif progress_type == "operation":
            run_watchdog.began[0] = run_watchdog.clock.now
        else:
            with collective_scope.collective_scope(0, "summing"):
                pass
    assert run_watchdog.look(12.0)


@pytest.mark.parametrize(("named_rank", "state"), [("rank 0", rank_status.LATE), ("rank 1", "")])
def test_rank_named_in_verdict_reports_late_state(
    named_rank: str, state: str, run_watchdog: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_status, "_buffer", bytearray(rank_status.BUFFER_BYTES))
    monkeypatch.setattr(timeouts.exit_guard, "exit_with_error", lambda *words: None)
    verdict = f"{named_rank} is missing: it has been saving for 9 s"
    timeouts.exit_stuck(verdict, run_watchdog._report(), None, "rank 0", 10.0)
    assert rank_status.current_status().state == state


def test_stopped_process_is_not_late(run_watchdog: Any) -> None:
    assert not run_watchdog.look(5.0)
    run_watchdog.clock.now += 60.0
    assert not run_watchdog.look(4.0) and run_watchdog.look(2.0)


@pytest.mark.parametrize(("stopped_s", "is_reported"), [(60.0, True), (2.0, False)])
def test_stack_dump_after_process_stop_is_explained(
    stopped_s: float,
    is_reported: bool,
    run_watchdog: Any,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    armed: list[float] = []
    monkeypatch.setattr(watchdog.faulthandler, "dump_traceback_later", lambda limit_s, file: armed.append(limit_s))
    run_watchdog._arm()
    run_watchdog.clock.now += stopped_s
    run_watchdog._arm()
    run_watchdog._arm()
    message = "rank 0: the stacks above were written because no thread ran for 60 s: the process was stopped, "
    assert capfd.readouterr().err.count(message) == is_reported and armed == [10.0, 10.0]


def test_changed_limit_takes_effect_immediately(run_watchdog: Any) -> None:
    run_watchdog.limit_s = 1000.0
    assert not run_watchdog.look(500.0)
    run_watchdog.limit_s = 10.0
    assert run_watchdog.look(0.2)


def _record_operations(rank: int) -> tuple[str, float, int, str | None]:
    """Return the last operations, with those of a thread in the background left out."""
    world = make_world(rank, 2)
    background_group = dist.new_group(backend="gloo")
    all_reduce(torch.ones(2), world.grid.data)
    released = threading.Event()

    def in_background() -> None:
        dist.all_reduce(torch.ones(7), group=background_group)
        released.set()
        finished.wait(SLACK_S)

    finished = threading.Event()
    thread = threading.Thread(target=in_background)
    thread.start()
    released.wait(SLACK_S)
    operations = flight_recorder.format_operations({world.grid.data.handle.group_name: "data"})
    for _ in range(30):
        all_reduce(torch.ones(3), world.grid.data)
    repeated = flight_recorder.format_operations({})
    finished.set()
    thread.join()
    return operations, flight_recorder.idle_s(), repeated.count("all_reduce"), repeated


def test_last_operations_are_main_thread_operations_with_groups() -> None:
    for operations, idle_s, num_lines, repeated in run_ranks(2, _record_operations):
        assert operations.endswith("all_reduce float[2] (data)") and "float[7]" not in operations
        assert idle_s < SLACK_S
        assert num_lines == 1 and "20 x all_reduce float[3] (default_pg)" in str(repeated)


def test_answered_alarm_calls_on_stuck(run_watchdog: Any) -> None:
    calls: list[Any] = []
    run_watchdog._on_stuck, run_watchdog._is_busy = (lambda *seen: calls.append(seen)), (lambda: True)
    run_watchdog._answer(run_watchdog._alarms)
    ((verdict, local_report, linger),) = calls
    assert (
        verdict.startswith("no rank is working") and local_report.is_waiting and linger == run_watchdog._alarms.linger
    )


@pytest.mark.parametrize("operation", [None, "all_reduce"])
def test_rank_in_collective_reports_waiting(
    operation: str | None, run_watchdog: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the one that waits for longest would be taken for the one that is stuck."""
    monkeypatch.setattr(thread_stack, "communication", lambda frame: operation)
    report = run_watchdog._report()
    assert report.is_waiting == (operation is not None) == ("waiting in all_reduce" in report.words)
    assert report.words.startswith("has been saving for 0.0 s")


def test_waiting_thread_reports_pending_operation() -> None:
    class Work:
        def wait(self) -> Any:
            return sys._getframe(1)

    work = Work()
    frame = work.wait()
    assert thread_stack.communication(frame) is None, "the line above has been left"
    assert thread_stack.communication(_waiting_frame(work)) == "an operation that it has started"
    assert thread_stack.communication(None) is None and thread_stack.format_stack(None) == ""
    assert thread_stack.format_location(frame).startswith(
        "test_waiting_thread_reports_pending_operation (test_watch.py:"
    )


def _waiting_frame(work: Any) -> Any:
    return work.wait()
