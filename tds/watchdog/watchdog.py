"""Watchdogs of an engine and of a run: timer and listener threads, time limits, and hooks for the reaction.

| class | raises an alarm if | reaction to the verdict |
|---|---|---|
| ``EngineWatchdog`` | a wait for other ranks exceeds the limit | the error of the wait names the missing rank |
| ``RunWatchdog`` | any phase exceeds its limit | the process exits with code 4 |
"""

from __future__ import annotations

import faulthandler
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from tds.p2p import collective_scope
from tds.watchdog import flight_recorder, thread_stack
from tds.watchdog.alarm import LINGER_S, PATIENCE_S, Alarms, write_report
from tds.watchdog.diagnosis import Report, State, format_history, report, with_device_action

CHECK_INTERVAL_S = 0.3
STOPPED_S = 1.0
"""If a thread sleeps this much longer than requested, its process was stopped or starved; this time is not counted."""
NOTES_PER_S = 500
"""Maximum location updates per second over all ranks, because the store has a single thread."""
REARM_S = 1.0
OUTSIDE = "outside of train_batch and eval_batch"
STORE_LOST = "the process group's store does not answer: its host, rank 0 or the launcher, is stopped or gone"


class NoPipeline:
    """Replaces the communicator for a rank without a pipeline."""

    action = waiting = None
    waits = history = ()
    links = None

    def device_action(self) -> None:
        """Return None, because there are no actions."""


class Watchdog:
    """Detects that this rank or another rank makes no progress. Subclasses implement the reaction.

    The main thread may hang, so two daemon threads check three times per second. The timer thread checks the state of
    the main thread, which needs no communication. If the state has not changed for longer than the limit, it requests
    an alarm. The listener thread communicates with the process group's store, which may not answer. It raises requested
    alarms, detects and answers alarms of other ranks, and reads the verdict. Each rank writes one line with its current
    operation, and its stack if it does not wait for other ranks. A rank that hangs in user code thus answers, and a
    stopped rank does not.

    Alarms are numbered, so a program that continues after an alarm is still watched, and each alarm has its own
    verdict. If a rank dies, its connections are closed; its neighbours fail immediately, then their neighbours. No
    alarm is raised in this case.

    Args:
        alarms: alarms over a store that only this run or engine uses; None: the watchdog is disabled.
        name: the name of this rank, for messages.
        limit_s: maximum time without progress of the main thread; may be changed at any time.
        communicator: the communicator of a pipeline's stage: ``action``, ``waiting``, ``waits``, ``history`` and
            ``links``.
        thread_name: name of both threads. They hold no reference to the watchdog and end when it is deleted.

    Attributes:
        progress: counter that the main thread increments when it makes progress.
        line_prefix: prefix of this rank's report line.
    """

    line_prefix = ""

    def __init__(self, alarms: Alarms | None, name: str, limit_s: float, communicator: Any, thread_name: str) -> None:
        self.limit_s, self.communicator, self.progress = limit_s, communicator, 0
        self._alarms, self._name = alarms, name
        self._last_state: State | None = None
        self._answered_state: State | None = None
        self._state_since = self._last_check = time.monotonic()
        self._call_idx = 0
        self._lock = threading.Lock()
        self._is_alarm_requested = self._has_reported = False
        self._alarm_noticed, self._finished = threading.Event(), threading.Event()
        self._verdict: str | None = None
        self._closed, self._wake = threading.Event(), threading.Event()
        self_ref = weakref.ref(self)
        self._timer = threading.Thread(target=_run_timer, args=(self_ref, self._closed), name=thread_name, daemon=True)
        pause_s = CHECK_INTERVAL_S if alarms is None else max(CHECK_INTERVAL_S, alarms.pause_s)
        listener_args = self_ref, self._wake, pause_s
        self._listener = threading.Thread(target=_run_listener, args=listener_args, name=thread_name, daemon=True)
        if alarms is not None:
            self._timer.start()
            self._listener.start()

    def close(self) -> None:
        """Stop watching."""
        self._closed.set()
        self._wake.set()

    # Hooks for subclasses.

    def _phase(self) -> str:
        """Describe the main thread's current phase."""
        raise NotImplementedError

    def _collective(self) -> str | None:
        """Describe the main thread's current collective; None if there is none."""
        return collective_scope.current_collective()

    def _limit_of(self, state: State) -> float:
        """The limit is in seconds."""
        return self.limit_s

    def _describe(self, local_report: Report, state: State) -> Report:
        """Add the subclass's information to ``local_report``, which is based on messages and collectives."""
        return local_report

    def _past_operations(self) -> list[str]:
        """Format the parts of the report line about earlier operations."""
        return [format_history(self.communicator.history)]

    def _write_location(self, alarms: Alarms) -> None:
        """Write this rank's location to the store periodically."""

    def _on_store_lost(self, error: RuntimeError) -> None:
        """React to the store's loss. The listener ends after this; the timer continues."""

    def _conclude(
        self, call_idx: int, verdict: str | None, local_report: Report, linger: Callable[[], None] | None
    ) -> None:
        """React to the verdict, and pass it to ``_finish``.

        Args:
            call_idx: the number of the watched call that the alarm belongs to, for ``_finish``.
            verdict: the verdict; None: the rank that raised the alarm exited before it could write the verdict.
            local_report: the report of this rank.
            linger: function to call before exiting, because the other ranks may still read the verdict from a store
                that this rank hosts; None: no such wait is needed.
        """
        raise NotImplementedError

    # The timer.

    def _check(self) -> None:
        """Request an alarm if this rank is late; if the store does not answer, conclude without it."""
        call_idx = self._call_idx
        if not self._is_late():
            return
        with self._lock:
            if call_idx != self._call_idx:
                return
            self._finished.clear()
            self._is_alarm_requested = True
        self._wake.set()
        patience_s = PATIENCE_S + LINGER_S + (self._alarms.extra_s if self._alarms else 0.0)
        if not self._finished.wait(patience_s) and call_idx == self._call_idx and not self._closed.is_set():
            own_report = self._report()
            self._write_report(own_report)
            self._answered_state = self._last_state
            self._conclude(call_idx, STORE_LOST, own_report, None)

    def _is_late(self) -> bool:
        """Return True if this rank has exceeded its state's time limit, and no alarm has been answered for it."""
        now = time.monotonic()
        stopped_s, self._last_check = now - self._last_check - CHECK_INTERVAL_S, now
        state = self._update(now)
        if stopped_s > STOPPED_S:
            self._state_since = min(now, self._state_since + stopped_s)
        limit_s = self._limit_of(state)
        if now - self._state_since <= limit_s or state == self._answered_state:
            return False
        self._state_since = max(self._state_since, now - flight_recorder.idle_s())
        return now - self._state_since > limit_s

    # The listener.

    def _poll_alarms(self) -> bool:
        """Raise a requested alarm or answer another rank's alarm; return True to continue listening."""
        if self._closed.is_set() or self._alarms is None:
            return False
        try:
            if (self._is_alarm_requested or self._alarms.is_raised()) and not self._closed.is_set():
                self._answer(self._alarms)
            self._write_location(self._alarms)
        except RuntimeError as error:
            self._on_store_lost(error)
            return False
        return True

    def _answer(self, alarms: Alarms) -> None:
        """Report this rank's state, and determine or read the alarm's verdict."""
        call_idx = self._call_idx
        self._alarm_noticed.set()
        own_report = self._report()
        self._answered_state = self._last_state
        self._write_report(own_report)
        self._conclude(call_idx, alarms.answer(own_report), own_report, alarms.linger)

    def _finish(self, call_idx: int, verdict: str | None) -> None:
        """Store the verdict, unless the watched call has ended."""
        with self._lock:
            if call_idx == self._call_idx:
                self._verdict, self._is_alarm_requested = verdict, False
                self._finished.set()

    # State and report of this rank.

    def _update(self, now: float) -> State:
        communicator = self.communicator
        count = self._call_idx, self.progress, len(communicator.waits), collective_scope.num_collective_scopes()
        state = State(self._phase(), communicator.action, communicator.waiting, self._collective(), count)
        if state != self._last_state:
            self._last_state, self._state_since = state, now
        return state

    def _report(self) -> Report:
        state = self._update(time.monotonic())
        since_s = time.monotonic() - self._state_since
        ranks = self.communicator.links.ranks if self.communicator.links else ()
        base_report = report(state.phase, state.action, state.waiting, state.collective, since_s, ranks)
        base_report = with_device_action(base_report, self.communicator.device_action())
        return self._describe(base_report, state)

    def _write_report(self, local_report: Report) -> None:
        """Write this rank's report line, at most once per watched call."""
        if not self._has_reported:
            self._has_reported = True
            write_report(
                "; ".join([f"{self.line_prefix}{self._name} {local_report.words}", *self._past_operations()]),
                local_report,
            )


def _run_timer(watchdog_ref: weakref.ref[Watchdog], closed: threading.Event) -> None:
    while not closed.wait(CHECK_INTERVAL_S) and (watchdog := watchdog_ref()) is not None:
        watchdog._check()
        del watchdog  # otherwise this thread would keep it alive


def _run_listener(watchdog_ref: weakref.ref[Watchdog], wake: threading.Event, pause_s: float) -> None:
    is_listening = True
    while is_listening:
        wake.wait(pause_s)
        wake.clear()
        watchdog = watchdog_ref()
        is_listening = watchdog is not None and watchdog._poll_alarms()
        del watchdog


class EngineWatchdog(Watchdog):
    """Watches one rank of an engine, so that the error of a timed-out wait names the missing rank.

    Args:
        communicator: the communicator of the engine's stage.
        store: a store that only this engine uses; None: only report this rank's state, without the other ranks.
        names: the name of every rank, for messages.
        limit_s: waits longer than this raise the alarm.
    """

    line_prefix = "tds watchdog: "

    def __init__(self, communicator: Any, store: Any, rank: int, names: Sequence[str], limit_s: float) -> None:
        self._current_phase = OUTSIDE
        self._collectives = collective_scope.CollectiveTracker(communicator.history)
        self._store_error: str | None = None
        alarms = None if store is None else Alarms(store, rank, names)
        super().__init__(alarms, names[rank], limit_s, communicator, "tds watchdog")

    @contextmanager
    def watch(self, phase: str) -> Iterator[None]:
        """Watch the block. If it fails because a peer is lost, raise an error that names the missing rank instead."""
        self._current_phase = phase
        try:
            with self._collectives.activate():
                yield
        except RuntimeError as error:
            explanation = self._explain(error)
            if explanation is None:
                raise
            raise collective_scope.PeerLost(f"{explanation}. {error}") from error
        finally:
            self._current_phase = OUTSIDE
            self._reset_state()

    def _reset_state(self) -> None:
        """Reset the state, so that the watched call's errors and alarms do not affect later calls."""
        self._collectives.reset()
        self.communicator.waiting = None
        with self._lock:
            self._call_idx += 1
            self._is_alarm_requested = self._has_reported = False
            self._verdict = None
            self._alarm_noticed.clear()
            self._finished.clear()

    def _explain(self, error: RuntimeError) -> str | None:
        """Return the verdict if ``error`` is caused by a timed-out wait of this or another rank; otherwise None."""
        lost = peer_lost(error)
        if lost is None or not (is_timeout(lost) or self._alarm_noticed.is_set()):
            return None
        with self._lock:
            self._is_alarm_requested = not self._finished.is_set()
        self._wake.set()
        patience_s = PATIENCE_S + (self._alarms.extra_s if self._alarms else 0.0)
        if self._listener.is_alive() and not self._finished.wait(patience_s):
            self._verdict = STORE_LOST
        self._write_report(self._report())
        return self._verdict or self._store_error

    def _phase(self) -> str:
        return self._current_phase

    def _collective(self) -> str | None:
        return (collective_scope.idle_tracker if self._current_phase == OUTSIDE else self._collectives).operation

    def _limit_of(self, state: State) -> float:
        is_waiting = state.waiting is not None or state.collective is not None
        return self.limit_s if is_waiting else float("inf")

    def _past_operations(self) -> list[str]:
        """On an accelerator, add the operations in torch's flight recorder, because the host only queues them."""
        if self.communicator.device_action() is None:
            return super()._past_operations()
        return [flight_recorder.format_operations({}), *super()._past_operations()]

    def _on_store_lost(self, error: RuntimeError) -> None:
        self._store_error = (
            f"the process group's store is gone, because its host, rank 0 or the launcher, has exited ({error})"
        )
        self._finished.set()

    def _conclude(
        self, call_idx: int, verdict: str | None, local_report: Report, linger: Callable[[], None] | None
    ) -> None:
        if linger is not None:
            linger()
        self._finish(call_idx, self._store_error or verdict)


class RunWatchdog(Watchdog):
    """Watches one rank of a run, whose main thread sets its phase and counts its steps.

    Only communication with other ranks, a completed step or a new phase counts as progress. If the watchdog's own
    threads do not run for ``limit_s``, ``faulthandler`` writes the stacks of all threads.

    Args:
        alarms: alarms over a store that only this run uses.
        get_phase: returns the phase of the main thread, such as "saving"; called by the watchdog's threads.
        groups: maps the names of process groups to descriptions.
        is_busy: returns True if the device still has work.
        on_stuck: called once with the verdict, the report of this rank, and a function to call before exiting (or
            None).
        warn: called with a warning for the log.

    ``communicator`` must be set after an engine with a pipeline has been built.
    """

    def __init__(
        self,
        alarms: Alarms,
        name: str,
        get_phase: Callable[[], str],
        limit_s: float,
        groups: Mapping[str, str],
        *,
        is_busy: Callable[[], bool],
        on_stuck: Callable[[str, Report, Callable[[], None] | None], object],
        warn: Callable[[str], object],
    ) -> None:
        self._get_phase, self._groups = get_phase, groups
        self._is_busy, self._on_stuck, self._warn = is_busy, on_stuck, warn
        self._armed = 0.0, 0.0
        self._location_written_s = 0.0
        super().__init__(alarms, name, limit_s, NoPipeline(), f"watch, {name}")

    def close(self) -> None:
        super().close()
        faulthandler.cancel_dump_traceback_later()
        for thread in (self._timer, self._listener):
            thread.join(CHECK_INTERVAL_S)  # a thread that waits for a lost store ends with the process

    def _check(self) -> None:
        self._arm()
        super()._check()

    def _arm(self) -> None:
        """Schedule a dump of all stacks by ``faulthandler`` in case this thread does not run for ``limit_s``.

        This happens while code holds the GIL, or if the process is stopped. The dump itself does not need the GIL. The
        warning is written when this thread runs again.
        """
        now, limit_s = time.monotonic(), self.limit_s
        if now - self._armed[0] > self._armed[1] > 0:
            self._warn(
                f"{self._name}: the stacks above were written because no thread ran for {now - self._armed[0]:.0f} s: "
                "the process was stopped, the machine was suspended, or code held the GIL. The process continues now"
            )
        if limit_s != self._armed[1] or now - self._armed[0] > REARM_S:
            self._armed = now, limit_s
            faulthandler.dump_traceback_later(limit_s, file=2)

    def _phase(self) -> str:
        return self._get_phase()

    def _write_location(self, alarms: Alarms) -> None:
        if time.monotonic() - self._location_written_s > alarms.num_ranks / NOTES_PER_S:
            self._location_written_s = time.monotonic()
            alarms.write_location(self._get_phase())

    def _describe(self, local_report: Report, state: State) -> Report:
        """Add the phase, the operation that the rank waits in, and the program's current line."""
        frame = thread_stack.main_frame()
        operation = thread_stack.communication(frame)
        words = local_report.words
        if local_report.is_waiting or state.action is not None:
            words += f", {state.phase.partition(', ')[0]}"
        if operation is not None and not local_report.is_waiting:
            words += f", waiting in {operation}"
        is_waiting = local_report.is_waiting or operation is not None or self._is_busy()
        return Report(
            is_waiting,
            local_report.waits_for,
            local_report.since_s,
            f"{words}, at {thread_stack.format_location(frame)}",
        )

    def _past_operations(self) -> list[str]:
        return [
            flight_recorder.format_operations(self._groups),
            *(super()._past_operations() if self.communicator.history else []),
        ]

    def _conclude(
        self, call_idx: int, verdict: str | None, local_report: Report, linger: Callable[[], None] | None
    ) -> None:
        self._finish(call_idx, verdict)
        self._on_stuck(
            verdict or "a rank raised the alarm and exited before it could report the missing rank",
            local_report,
            linger,
        )


def peer_lost(error: BaseException | None) -> collective_scope.PeerLost | None:
    """Find the first ``PeerLost`` in the chain of causes of ``error``; None if there is none."""
    while error is not None and not isinstance(error, collective_scope.PeerLost):
        error = error.__cause__
    return error


def is_timeout(lost: collective_scope.PeerLost) -> bool:
    """Return True if a backend timeout caused ``lost``; the error's text shows it."""
    cause = lost.__cause__
    while cause is not None:
        text = str(cause).lower()
        if "timed out" in text or "timeout" in text:
            return True
        cause = cause.__cause__
    return False


def rank_name(rank: int, coordinate: Any) -> str:
    """Format a rank and its coordinates in DeepSpeed's topology as "rank 3 (stage 1, replica 0)"."""
    tensor = f", tensor {coordinate.model}" if hasattr(coordinate, "model") else ""
    return f"rank {rank} (stage {coordinate.pipe}, replica {coordinate.data}{tensor})"
