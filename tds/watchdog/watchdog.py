"""Watchdog: one mechanism for engine and run (timer + listener threads, per-phase limit), hooks for what to do.

| policy | late is | once the verdict is there |
|---|---|---|
| ``EngineWatchdog`` | a wait for others that takes too long | the error of the wait says who did not come |
| ``RunWatchdog`` | anything that takes longer than its phase may | the process leaves, with code 4 |
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
"""A thread that slept so much longer than it asked was stopped or starved, its process too: that is not late."""
NOTES_PER_S = 500
"""How often all ranks together leave word of where they are: the store has one thread for all of them."""
REARM_S = 1.0
OUTSIDE = "outside of train_batch and eval_batch"
STORE_LOST = "the process group's store does not answer: its host, rank 0 or the launcher, is stopped or gone"


class NoPipeline:
    """What is seen of the messages of a rank that sends none from stage to stage."""

    action = waiting = None
    waits = history = ()
    links = None

    def action_of_device(self) -> None:
        """Return None: no stage, no action."""


class Watchdog:
    """Sees when its rank, or another, gets no further; a subclass decides what to do then.

    The main thread may be stuck, so two daemon threads look three times a second. The timer looks at what the main
    thread is at and needs nobody for it: once that has not changed for longer than the limit, it has the alarm raised.
    The listener speaks with the process group's store, which may not answer: it hears the alarms of others, answers
    them, and learns who did not come. Each rank writes one line on what it is at, with its stack if it waits for
    nobody. So a rank that is stuck in a user's code answers, and one that was stopped does not.

    Alarms are numbered: a program that goes on is watched on, and the next alarm finds a verdict of its own. A rank
    that dies closes its connections, so its neighbours fail at once, and theirs after them: no alarm is raised.

    Args:
        alarms: over a store for this run or engine alone; None: nothing is watched.
        name: of this rank, for messages.
        limit_s: for how long the main thread may get no further; may change at any time.
        exchange: of a pipeline's stage: ``action``, ``waiting``, ``waits``, ``history`` and ``links``.
        thread_name: of both threads, which hold no reference to the watchdog and end once it is gone.

    Attributes:
        progress: counts what the main thread has got done; it adds to it.
        start_of_line: of what this rank says of itself.
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
        own = weakref.ref(self)
        self._timer = threading.Thread(target=_time, args=(own, self._closed), name=thread_name, daemon=True)
        pause_s = LOOK_S if alarms is None else max(LOOK_S, alarms.pause_s)
        listened = own, self._wake, pause_s
        self._listener = threading.Thread(target=_listen, args=listened, name=thread_name, daemon=True)
        if alarms is not None:
            self._timer.start()
            self._listener.start()

    def close(self) -> None:
        """Watch no longer."""
        self._closed.set()
        self._wake.set()

    # Hooks: what is a policy's own.

    def _phase(self) -> str:
        """Return in words what the main thread is in."""
        raise NotImplementedError

    def _together(self) -> str | None:
        """Return the collective that the main thread is in, in words."""
        return collective_scope.current_collective()

    def _may_last(self, state: State) -> float:
        """Return for how many seconds this rank may be at ``state``."""
        return self.limit_s

    def _describe(self, own: Report, state: State) -> Report:
        """Return what this rank says of itself, from what its messages and collectives tell."""
        return own

    def _past(self) -> list[str]:
        """Return what its one line says of the time before."""
        return [format_history(self.exchange.history)]

    def _note(self, alarms: Alarms) -> None:
        """Leave word in the store, now and then."""

    def _lose_store(self, error: RuntimeError) -> None:
        """The store is gone: the timer goes on alone."""

    def _conclude(self, number: int, found: str | None, own: Report, linger: Callable[[], None] | None) -> None:
        """Do what is to be done once the verdict is there, and ``_finish`` it.

        Args:
            number: of what the alarm was about, for ``_finish``.
            found: who did not come; None: the rank that raised the alarm left before it could say so.
            own: what this rank is at.
            linger: what to wait for ahead of leaving (the others may still read the verdict from a store of this
                rank), if anything.
        """
        raise NotImplementedError

    # The timer.

    def _look(self) -> None:
        """Raise the alarm if this rank is late; without an answer of the store, conclude without it."""
        number = self._number
        if not self._is_late():
            return
        with self._lock:
            if number != self._number:
                return
            self._finished.clear()
            self._asked = True
        self._wake.set()
        patience_s = PATIENCE_S + LINGER_S + (self._alarms.more_s if self._alarms else 0.0)
        if not self._finished.wait(patience_s) and number == self._number and not self._closed.is_set():
            own = self._report()
            self._write_report(own)
            self._answered = self._seen
            self._conclude(number, STORE_LOST, own, None)

    def _is_late(self) -> bool:
        """Return whether this rank has got no further for longer than it may; once for each state."""
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
        """Raise the alarm if it was asked for, or answer another's; return whether to listen on."""
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
        """Say what this rank is at, and find or fetch the verdict of this alarm."""
        number = self._number
        self._heard.set()
        own = self._report()
        self._answered = self._seen
        self._write_report(own)
        self._conclude(number, alarms.answer(own), own, alarms.linger)

    def _finish(self, number: int, found: str | None) -> None:
        """Keep the verdict, unless what it was about is over."""
        with self._lock:
            if number == self._number:
                self._verdict, self._asked = found, False
                self._finished.set()

    # What this rank is at.

    def _update(self, now: float) -> State:
        exchange = self.exchange
        count = self._number, self.progress, len(exchange.waits), collective_scope.number_together()
        state = State(self._phase(), exchange.action, exchange.waiting, self._together(), count)
        if state != self._seen:
            self._seen, self._since = state, now
        return state

    def _report(self) -> Report:
        """Return what this rank is at: whether it waits, for whom, for how long."""
        state = self._update(time.monotonic())
        since_s = time.monotonic() - self._since
        ranks = self.exchange.links.ranks if self.exchange.links else ()
        own = report(state.phase, state.action, state.waiting, state.together, since_s, ranks)
        own = on_device(own, self.exchange.action_of_device())
        return self._describe(own, state)

    def _write_report(self, own: Report) -> None:
        """Write this rank's one line."""
        if not self._has_reported:
            self._has_reported = True
            write_report("; ".join([f"{self.start_of_line}{self._name} {own.words}", *self._past()]), own)


def _time(own: weakref.ref[Watchdog], closed: threading.Event) -> None:
    while not closed.wait(LOOK_S) and (watchdog := own()) is not None:
        watchdog._look()
        del watchdog  # else this thread would keep it alive


def _listen(own: weakref.ref[Watchdog], wake: threading.Event, pause_s: float) -> None:
    is_on = True
    while is_on:
        wake.wait(pause_s)
        wake.clear()
        watchdog = own()
        is_on = watchdog is not None and watchdog._hear()
        del watchdog


class EngineWatchdog(Watchdog):
    """Watches one rank of an engine: the error of a wait that timed out says who did not come.

    Args:
        exchange: of the engine's stage.
        store: for this engine alone; None: say what this rank knows, without asking others.
        names: of every rank, for messages.
        limit_s: longer waits raise the alarm.
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
        """Watch what is done within; let an error of a peer that is lost name the one who did not come."""
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
        """Begin anew: what comes has nothing to do with what an error has left, or with an alarm heard until here."""
        self._own_collectives.forget()
        self.exchange.waiting = None
        with self._lock:
            self._number += 1
            self._asked = self._has_reported = False
            self._verdict = None
            self._heard.clear()
            self._finished.clear()

    def _explain(self, error: RuntimeError) -> str | None:
        """Return who did not come, if ``error`` is a wait that timed out or comes of another's."""
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
        """On a device, whose operations the host only starts, with those that torch's flight recorder has."""
        if self.exchange.action_of_device() is None:
            return super()._past()
        return [flight_recorder.format_operations({}), *super()._past()]

    def _lose_store(self, error: RuntimeError) -> None:
        self._is_cut_off = f"the process group's store is gone, with its host, rank 0 or the launcher ({error})"
        self._finished.set()

    def _conclude(self, number: int, found: str | None, own: Report, linger: Callable[[], None] | None) -> None:
        if linger is not None:
            linger()
        self._finish(number, self._is_cut_off or found)


class RunWatchdog(Watchdog):
    """Watches one rank of a run, whose main thread names its phase and counts its steps.

    A rank that is late has its stacks shown too, and nothing but an operation between ranks, a step or another phase
    counts as getting further.

    Args:
        alarms: over a store for this run alone.
        where: tells what the main thread is in, such as "saving"; called by the threads.
        groups: the name of a process group -> what to call it.
        is_busy: tells whether the device still has work.
        on_stuck: called once with who did not come, what this rank is at, and what to wait for ahead of leaving.
        warn: called with what is to be said in a line of the log.

    ``exchange`` is to be set once there is an engine with a pipeline.
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
            thread.join(LOOK_S)  # one that waits for a store that is gone ends with the process

    def _look(self) -> None:
        self._arm()
        super()._look()

    def _arm(self) -> None:
        """Have the stacks shown, without Python's help, where this thread is not called for so long as the limit.

        That is so while code holds Python's lock, and where the whole process was stopped; which of them it was shows
        only once this thread is called again.
        """
        now, limit_s = time.monotonic(), self.limit_s
        if now - self._armed[0] > self._armed[1] > 0:
            self._warn(
                f"{self._name}: the stacks above were shown because nothing ran here for {now - self._armed[0]:.0f} s: "
                "the process was stopped, its machine slept, or code held Python's lock. It goes on now"
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
        """Add the phase, the operation that it waits in, and the line of the program."""
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
        self._on_stuck(found or "a rank raised the alarm and left before it could say who did not come", own, linger)


def peer_lost(error: BaseException | None) -> collective_scope.PeerLost | None:
    """Return the first error in the chain of causes that says that a peer is lost; None if none does."""
    while error is not None and not isinstance(error, collective_scope.PeerLost):
        error = error.__cause__
    return error


def is_timeout(lost: collective_scope.PeerLost) -> bool:
    """True if the backend's error behind ``lost`` is a wait that took too long; it has no class of its own for it."""
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
