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
from tds.watchdog.diagnosis import Report, State, format_history, on_device, report

LOOK_S = 0.3
STOPPED_S = 1.0
"""If a thread sleeps this much longer than requested, its process was stopped or starved; this time is not counted."""
NOTES_PER_S = 500
"""Maximum location updates per second of all ranks, because the store has a single thread."""
REARM_S = 1.0
OUTSIDE = "outside of train_batch and eval_batch"
STORE_LOST = "the process group's store does not answer: its host, rank 0 or the launcher, is stopped or gone"


class NoPipeline:
    """Replaces the communicator for a rank without a pipeline."""

    action = waiting = None
    waits = history = ()
    links = None

    def action_of_device(self) -> None:
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
        exchange: the communicator of a pipeline's stage: ``action``, ``waiting``, ``waits``, ``history`` and ``links``.
        thread_name: name of both threads. They hold no reference to the watchdog and end when it is deleted.

    Attributes:
        progress: counter that the main thread increments when it makes progress.
        start_of_line: prefix of this rank's report line.
    """

    start_of_line = ""

    def __init__(self, alarms: Alarms | None, name: str, limit_s: float, exchange: Any, thread_name: str) -> None:
        self.limit_s, self.exchange, self.progress = limit_s, exchange, 0
        self._alarms, self._name = alarms, name
        self._seen: State | None = None
        self._answered: State | None = None
        self._since = self._looked = time.monotonic()
        self._number = 0
        self._lock = threading.Lock()
        self._asked = self._has_reported = False
        self._heard, self._finished = threading.Event(), threading.Event()
        self._verdict: str | None = None
        self._closed, self._wake = threading.Event(), threading.Event()
        self_ref = weakref.ref(self)
        self._timer = threading.Thread(target=_time, args=(self_ref, self._closed), name=thread_name, daemon=True)
        pause_s = LOOK_S if alarms is None else max(LOOK_S, alarms.pause_s)
        listener_args = self_ref, self._wake, pause_s
        self._listener = threading.Thread(target=_listen, args=listener_args, name=thread_name, daemon=True)
        if alarms is not None:
            self._timer.start()
            self._listener.start()

    def close(self) -> None:
        """Stop watching."""
        self._closed.set()
        self._wake.set()

    # Hooks for subclasses.

    def _phase(self) -> str:
        """Return the description of the main thread's current phase."""
        raise NotImplementedError

    def _together(self) -> str | None:
        """Return the description of the main thread's current collective, or None."""
        return collective_scope.current_collective()

    def _may_last(self, state: State) -> float:
        """Return the time limit of ``state`` in seconds."""
        return self.limit_s

    def _describe(self, own: Report, state: State) -> Report:
        """Return ``own``, the report based on messages and collectives, with information of the subclass added."""
        return own

    def _past(self) -> list[str]:
        """Return the parts of the report line about earlier operations."""
        return [format_history(self.exchange.history)]

    def _note(self, alarms: Alarms) -> None:
        """Write the location of this rank to the store periodically."""

    def _lose_store(self, error: RuntimeError) -> None:
        """React to the loss of the store. The listener ends after this; the timer continues."""

    def _conclude(self, number: int, found: str | None, own: Report, linger: Callable[[], None] | None) -> None:
        """React to the verdict, and pass it to ``_finish``.

        Args:
            number: the number of the watched call that the alarm belongs to, for ``_finish``.
            found: the verdict; None: the rank that raised the alarm exited before it could write the verdict.
            own: the report of this rank.
            linger: function to call before exiting, because the other ranks may still read the verdict from a store
                that this rank hosts; None: no such wait is needed.
        """
        raise NotImplementedError

    # The timer.

    def _look(self) -> None:
        """Request an alarm if this rank is late; if the store does not answer, conclude without it."""
        call_number = self._number
        if not self._is_late():
            return
        with self._lock:
            if call_number != self._number:
                return
            self._finished.clear()
            self._asked = True
        self._wake.set()
        patience_s = PATIENCE_S + LINGER_S + (self._alarms.more_s if self._alarms else 0.0)
        if not self._finished.wait(patience_s) and call_number == self._number and not self._closed.is_set():
            own_report = self._report()
            self._write_report(own_report)
            self._answered = self._seen
            self._conclude(call_number, STORE_LOST, own_report, None)

    def _is_late(self) -> bool:
        """Return True if this rank has exceeded the time limit of its state, and no alarm has been answered for it."""
        now = time.monotonic()
        stopped_s, self._looked = now - self._looked - LOOK_S, now
        state = self._update(now)
        if stopped_s > STOPPED_S:
            self._since = min(now, self._since + stopped_s)
        limit_s = self._may_last(state)
        if now - self._since <= limit_s or state == self._answered:
            return False
        self._since = max(self._since, now - flight_recorder.idle_s())
        return now - self._since > limit_s

    # The listener.

    def _hear(self) -> bool:
        """Raise a requested alarm or answer another rank's alarm; return True to continue listening."""
        if self._closed.is_set() or self._alarms is None:
            return False
        try:
            if (self._asked or self._alarms.is_raised()) and not self._closed.is_set():
                self._answer(self._alarms)
            self._note(self._alarms)
        except RuntimeError as error:
            self._lose_store(error)
            return False
        return True

    def _answer(self, alarms: Alarms) -> None:
        """Report the state of this rank, and determine or read the verdict of the alarm."""
        call_number = self._number
        self._heard.set()
        own_report = self._report()
        self._answered = self._seen
        self._write_report(own_report)
        self._conclude(call_number, alarms.answer(own_report), own_report, alarms.linger)

    def _finish(self, number: int, found: str | None) -> None:
        """Store the verdict, unless the watched call has ended."""
        with self._lock:
            if number == self._number:
                self._verdict, self._asked = found, False
                self._finished.set()

    # State and report of this rank.

    def _update(self, now: float) -> State:
        exchange = self.exchange
        count = self._number, self.progress, len(exchange.waits), collective_scope.number_together()
        state = State(self._phase(), exchange.action, exchange.waiting, self._together(), count)
        if state != self._seen:
            self._seen, self._since = state, now
        return state

    def _report(self) -> Report:
        """Return the report of this rank: its operation, the rank it waits for, and the duration."""
        state = self._update(time.monotonic())
        since_s = time.monotonic() - self._since
        ranks = self.exchange.links.ranks if self.exchange.links else ()
        base_report = report(state.phase, state.action, state.waiting, state.together, since_s, ranks)
        base_report = on_device(base_report, self.exchange.action_of_device())
        return self._describe(base_report, state)

    def _write_report(self, own: Report) -> None:
        """Write this rank's report line, at most once per watched call."""
        if not self._has_reported:
            self._has_reported = True
            write_report("; ".join([f"{self.start_of_line}{self._name} {own.words}", *self._past()]), own)


def _time(own: weakref.ref[Watchdog], closed: threading.Event) -> None:
    while not closed.wait(LOOK_S) and (watchdog := own()) is not None:
        watchdog._look()
        del watchdog  # otherwise this thread would keep it alive


def _listen(own: weakref.ref[Watchdog], wake: threading.Event, pause_s: float) -> None:
    is_on = True
    while is_on:
        wake.wait(pause_s)
        wake.clear()
        watchdog = own()
        is_on = watchdog is not None and watchdog._hear()
        del watchdog


class EngineWatchdog(Watchdog):
    """Watches one rank of an engine, so that the error of a timed-out wait names the missing rank.

    Args:
        exchange: the communicator of the engine's stage.
        store: a store that only this engine uses; None: only report this rank's state, without the other ranks.
        names: the name of every rank, for messages.
        limit_s: waits longer than this raise the alarm.
    """

    start_of_line = "tds watchdog: "

    def __init__(self, exchange: Any, store: Any, rank: int, names: Sequence[str], limit_s: float) -> None:
        self._now = OUTSIDE
        self._own_collectives = collective_scope.Together(exchange.history)
        self._is_cut_off: str | None = None
        alarms = None if store is None else Alarms(store, rank, names)
        super().__init__(alarms, names[rank], limit_s, exchange, "tds watchdog")

    @contextmanager
    def over(self, phase: str) -> Iterator[None]:
        """Watch the block. If it fails because a peer is lost, raise an error that names the missing rank instead."""
        self._now = phase
        try:
            with self._own_collectives.at_work():
                yield
        except RuntimeError as error:
            explanation = self._explain(error)
            if explanation is None:
                raise
            raise collective_scope.PeerLost(f"{explanation}. {error}") from error
        finally:
            self._now = OUTSIDE
            self._forget()

    def _forget(self) -> None:
        """Reset the state, so that errors and alarms of the watched call do not affect later calls."""
        self._own_collectives.forget()
        self.exchange.waiting = None
        with self._lock:
            self._number += 1
            self._asked = self._has_reported = False
            self._verdict = None
            self._heard.clear()
            self._finished.clear()

    def _explain(self, error: RuntimeError) -> str | None:
        """Return the verdict if ``error`` is caused by a timed-out wait of this or another rank; otherwise None."""
        lost = peer_lost(error)
        if lost is None or not (is_timeout(lost) or self._heard.is_set()):
            return None
        with self._lock:
            self._asked = not self._finished.is_set()
        self._wake.set()
        patience_s = PATIENCE_S + (self._alarms.more_s if self._alarms else 0.0)
        if self._listener.is_alive() and not self._finished.wait(patience_s):
            self._verdict = STORE_LOST
        self._write_report(self._report())
        return self._verdict or self._is_cut_off

    def _phase(self) -> str:
        return self._now

    def _together(self) -> str | None:
        return (collective_scope.outside if self._now == OUTSIDE else self._own_collectives).doing

    def _may_last(self, state: State) -> float:
        is_waiting = state.waiting is not None or state.together is not None
        return self.limit_s if is_waiting else float("inf")

    def _past(self) -> list[str]:
        """On an accelerator, add the operations of torch's flight recorder, because the host only queues them."""
        if self.exchange.action_of_device() is None:
            return super()._past()
        return [flight_recorder.format_operations({}), *super()._past()]

    def _lose_store(self, error: RuntimeError) -> None:
        self._is_cut_off = (
            f"the process group's store is gone, because its host, rank 0 or the launcher, has exited ({error})"
        )
        self._finished.set()

    def _conclude(self, number: int, found: str | None, own: Report, linger: Callable[[], None] | None) -> None:
        if linger is not None:
            linger()
        self._finish(number, self._is_cut_off or found)


class RunWatchdog(Watchdog):
    """Watches one rank of a run, whose main thread sets its phase and counts its steps.

    Only communication with other ranks, a completed step or a new phase counts as progress. If the watchdog's own
    threads do not run for ``limit_s``, ``faulthandler`` writes the stacks of all threads.

    Args:
        alarms: alarms over a store that only this run uses.
        where: returns the phase of the main thread, such as "saving"; called by the watchdog's threads.
        groups: maps the names of process groups to descriptions.
        is_busy: returns True if the device still has work.
        on_stuck: called once with the verdict, the report of this rank, and a function to call before exiting (or
            None).
        warn: called with a warning for the log.

    ``exchange`` must be set after an engine with a pipeline has been built.
    """

    def __init__(
        self,
        alarms: Alarms,
        name: str,
        where: Callable[[], str],
        limit_s: float,
        groups: Mapping[str, str],
        *,
        is_busy: Callable[[], bool],
        on_stuck: Callable[[str, Report, Callable[[], None] | None], object],
        warn: Callable[[str], object],
    ) -> None:
        self._where, self._groups = where, groups
        self._is_busy, self._on_stuck, self._warn = is_busy, on_stuck, warn
        self._armed = 0.0, 0.0
        self._noted = 0.0
        super().__init__(alarms, name, limit_s, NoPipeline(), f"watch, {name}")

    def close(self) -> None:
        super().close()
        faulthandler.cancel_dump_traceback_later()
        for thread in (self._timer, self._listener):
            thread.join(LOOK_S)  # a thread that waits for a lost store ends with the process

    def _look(self) -> None:
        self._arm()
        super()._look()

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
        return self._where()

    def _note(self, alarms: Alarms) -> None:
        if time.monotonic() - self._noted > alarms.num_ranks / NOTES_PER_S:
            self._noted = time.monotonic()
            alarms.note(self._where())

    def _describe(self, own: Report, state: State) -> Report:
        """Add the phase, the operation that the rank waits in, and the current line of the program."""
        frame = thread_stack.main_frame()
        operation = thread_stack.communication(frame)
        words = own.words
        if own.is_waiting or state.action is not None:
            words += f", {state.phase.partition(', ')[0]}"
        if operation is not None and not own.is_waiting:
            words += f", waiting in {operation}"
        is_waiting = own.is_waiting or operation is not None or self._is_busy()
        return Report(is_waiting, own.waits_for, own.since_s, f"{words}, at {thread_stack.format_place(frame)}")

    def _past(self) -> list[str]:
        return [flight_recorder.format_operations(self._groups), *(super()._past() if self.exchange.history else [])]

    def _conclude(self, number: int, found: str | None, own: Report, linger: Callable[[], None] | None) -> None:
        self._finish(number, found)
        self._on_stuck(
            found or "a rank raised the alarm and exited before it could report the missing rank", own, linger
        )


def peer_lost(error: BaseException | None) -> collective_scope.PeerLost | None:
    """Return the first ``PeerLost`` in the chain of causes of ``error``, or None."""
    while error is not None and not isinstance(error, collective_scope.PeerLost):
        error = error.__cause__
    return error


def is_timeout(lost: collective_scope.PeerLost) -> bool:
    """Return True if ``lost`` was caused by a timeout of the backend, which is recognised by the error's text."""
    cause = lost.__cause__
    while cause is not None:
        text = str(cause).lower()
        if "timed out" in text or "timeout" in text:
            return True
        cause = cause.__cause__
    return False


def name_of(rank: int, place: Any) -> str:
    """Return "rank 3 (stage 1, replica 0)" from a rank's coordinates in DeepSpeed's topology."""
    tensor = f", tensor {place.model}" if hasattr(place, "model") else ""
    return f"rank {rank} (stage {place.pipe}, replica {place.data}{tensor})"
