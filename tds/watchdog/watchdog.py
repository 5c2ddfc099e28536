"""Watchdog: one mechanism for engine and run (timer + listener threads, per-phase limit), hooks for what to do."""

from __future__ import annotations

import faulthandler
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from tds.p2p import communicator
from tds.watchdog import diagnosis
from tds.watchdog.alarm import LINGER_S, PATIENCE_S, POLL_S, Alarms, tell
from tds.watchdog.diagnosis import Report, State, report, told_messages

# A watchdog that says who did not come when a rank has waited too long.
#
# Each rank has a daemon thread with a connection of its own to the process group's store, because the main thread is
# stuck in a wait then. A rank whose wait times out raises an alarm in the store. The threads, which look there five
# times a second, print one line each and leave in the store what their rank is at; so a rank that is stuck in a user's
# code answers, and one that was stopped does not. The one that raised the alarm reads the answers and writes down who
# did not come, and every rank's error says so. A store that does not answer is itself the news: its host is gone.
#
# Alarms are numbered: an engine whose program caught the error, or that was only late (on GPUs nothing ends a wait that
# takes long), is watched on, and the next alarm finds a verdict of its own.
#
# A rank that dies closes its connections, so its neighbours fail at once, and theirs after them: no alarm is raised.

GRACE_S = 1.0
"""The thread raises the alarm itself this long after the limit, where a wait cannot time out (on GPUs)."""
OUTSIDE = "outside of train_batch and eval_batch"


class Watchdog:
    """Watches one rank of an engine.

    Args:
        exchange: tells ``action``, ``waiting``, ``history`` and ``links``.
        store: for this engine alone; None: say what this rank knows, without asking others.
        names: of every rank, for messages.
        limit_s: longer waits raise the alarm; may change at any time.
    """

    def __init__(self, exchange: Any, store: Any, rank: int, names: Sequence[str], limit_s: float) -> None:
        self._exchange = exchange
        self._alarms = None if store is None else Alarms(store, rank, names)
        self._name, self.limit_s = names[rank], limit_s
        self._phase = OUTSIDE
        self._together = communicator.Together(exchange.history)
        self._seen: State | None = None
        self._since = time.monotonic()
        self._answered: State | None = None
        self._number = 0
        self._lock = threading.Lock()
        self._asked = self._has_told = False
        self._heard = threading.Event()
        self._done = threading.Event()
        self._is_over = False
        self._wake = threading.Event()
        self._verdict: str | None = None
        self._is_cut_off: str | None = None
        self._thread = threading.Thread(
            target=_watch, args=(weakref.ref(self), self._wake), name="tds watchdog", daemon=True
        )
        if store is not None:
            self._thread.start()

    def stop(self) -> None:
        """Watch no longer, because somebody else does."""
        self._is_over = True
        self._wake.set()

    @contextmanager
    def over(self, phase: str) -> Iterator[None]:
        """Watch what is done within; let an error of a peer that is lost name the one who did not come."""
        self._phase = phase
        try:
            with self._together.at_work():
                yield
        except RuntimeError as error:
            told = self._explain(error)
            if told is None:
                raise
            raise communicator.PeerLost(f"{told}. {error}") from error
        finally:
            self._phase = OUTSIDE
            self._forget()

    def _forget(self) -> None:
        """Begin anew: what comes has nothing to do with what an error has left, or with an alarm heard until here."""
        self._together.forget()
        self._exchange.waiting = None
        with self._lock:
            self._number += 1
            self._asked = self._has_told = False
            self._verdict = None
            self._heard.clear()
            self._done.clear()

    def _explain(self, error: RuntimeError) -> str | None:
        """Return who did not come, if ``error`` is a wait that timed out or comes of another's."""
        lost = peer_lost(error)
        if lost is None or not (is_timeout(lost) or self._heard.is_set()):
            return None
        self._asked = True
        self._wake.set()
        if self._thread.is_alive() and not self._done.wait(PATIENCE_S):
            host = "its host, rank 0 or the launcher, is stopped or gone"
            self._verdict = f"the process group's store does not answer: {host}"
        self._tell(self._report())
        return self._verdict or self._is_cut_off

    def look(self) -> bool:
        """Answer an alarm if there is one; return whether to look again."""
        if self._is_over or self._alarms is None:
            return False
        try:
            is_asked = self._asked and not self._done.is_set()
            if is_asked or self._is_late() or self._alarms.is_raised():
                self._answer(self._alarms)
        except RuntimeError as error:
            self._is_cut_off = f"the process group's store is gone, with its host, rank 0 or the launcher ({error})"
            self._done.set()
        return self._is_cut_off is None

    def _is_late(self) -> bool:
        """True once for each wait that lasts for too long."""
        waited_s = self._waited_s()
        return waited_s > self.limit_s + GRACE_S and self._seen != self._answered

    def _answer(self, alarms: Alarms) -> None:
        """Say what this rank is at, and find or fetch the verdict of this alarm."""
        number = self._number
        self._heard.set()
        own = self._report()
        self._answered = self._seen
        self._tell(own)
        found = alarms.answer(own)
        alarms.linger()
        with self._lock:
            if number == self._number:  # else what it was about is over
                self._verdict = found
                self._done.set()

    def _state(self) -> State:
        exchange, phase = self._exchange, self._phase
        count = self._number, len(exchange.waits), communicator.number_together()
        action = None if phase == OUTSIDE else exchange.action
        together = (communicator.outside if phase == OUTSIDE else self._together).doing
        return State(phase, action, exchange.waiting, together, count)

    def _waited_s(self) -> float:
        """Return for how long this rank has waited for others, in one wait; 0 while it works."""
        state = self._state()
        if state != self._seen:
            self._seen, self._since = state, time.monotonic()
        is_waiting = state.waiting is not None or state.together is not None
        return time.monotonic() - self._since if is_waiting else 0.0

    def _report(self) -> Report:
        self._waited_s()
        state = self._seen or self._state()
        since_s = time.monotonic() - self._since
        ranks = self._exchange.links.ranks
        return report(state.phase, state.action, state.waiting, state.together, since_s, ranks)

    def _tell(self, own: Report) -> None:
        """Write this rank's one line."""
        if not self._has_told:
            self._has_told = True
            tell(f"tds watchdog: {self._name} {own.words}; {told_messages(self._exchange.history)}", own)


def _watch(watchdog: weakref.ref[Watchdog], wake: threading.Event) -> None:
    """Look again and again until the watchdog is gone with its engine, which the thread must not keep alive."""
    is_on = True
    while is_on:
        wake.wait(POLL_S)
        wake.clear()
        present = watchdog()
        is_on = present is not None and present.look()
        del present


def peer_lost(error: BaseException | None) -> communicator.PeerLost | None:
    """Return the first error in the chain of causes that says that a peer is lost; None if none does."""
    while error is not None and not isinstance(error, communicator.PeerLost):
        error = error.__cause__
    return error


def is_timeout(lost: communicator.PeerLost) -> bool:
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


# Who is stuck: each rank has two threads that see when it, or another, gets no further.
#
# One looks at what its own main thread is at, three times a second, and needs nobody for it. Once that has not changed
# for longer than the limit of the phase, it has the alarm raised. The other one speaks with the process group's store,
# which may not answer: it hears the alarms of others, answers them, and learns who did not come (``tds.alarm``). Every
# rank then says what it is at, with its last operations and, if it waits for nobody, its stack, and does what it is
# told to do then: the run leaves with code 4.
#
# Nothing is asked of the main thread but that it names its phase and counts its steps.

LOOK_S = 0.3
STOPPED_S = 1.0
"""A thread that slept so much longer than it asked was stopped or starved, its process too: that is not late."""
NOTES_PER_S = 500
"""How often all ranks together leave word of where they are: the store has one thread for all of them."""
REARM_S = 1.0
STORE_LOST = "the process group's store does not answer: its host, rank 0 or the launcher, is stopped or gone"


class NoPipeline:
    """What is seen of the messages of a rank that sends none from stage to stage."""

    action = waiting = None
    waits = history = ()
    links = None


class Watch:
    """The threads of one rank.

    Args:
        alarms: over a store for this run alone.
        name: of this rank, for messages.
        where: tells what the main thread is in, such as "saving"; called by the threads.
        limit_s: for how long the main thread may get no further; may change at any time.
        groups: the name of a process group -> what to call it.
        is_busy: tells whether the device still has work.
        on_stuck: called once with who did not come, what this rank is at, and what to wait for ahead of leaving (the
            others may still read the verdict from a store of this rank), if anything.
        warn: called with what is to be said in a line of the log.

    Attributes:
        progress: counts what the main thread has got done; it adds to it.
        exchange: of a pipeline's engine, to be set once there is one.
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
        self.limit_s, self.progress = limit_s, 0
        self.exchange: Any = NoPipeline()
        self._alarms, self._name, self._where = alarms, name, where
        self._groups = groups
        self._is_busy, self._on_stuck, self._warn = is_busy, on_stuck, warn
        self._seen: State | None = None
        self._since = self._looked = time.monotonic()
        self._armed = 0.0, 0.0
        self._asked = threading.Event()
        self._closed = threading.Event()
        self._settled = threading.Event()
        self._threads = [
            threading.Thread(target=target, name=f"watch, {name}", daemon=True)
            for target, name in ((self._time, "timer"), (self._listen, "listener"))
        ]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """End the threads."""
        self._closed.set()
        faulthandler.cancel_dump_traceback_later()
        self._asked.set()
        for thread in self._threads:
            thread.join(LOOK_S)  # one that waits for a store that is gone ends with the process

    def _time(self) -> None:
        while not self._closed.wait(LOOK_S):
            self._arm()
            if not self._is_late():
                continue
            self._asked.set()
            if not self._settled.wait(PATIENCE_S + LINGER_S):
                own = self._report()
                self._tell(own)
                self._on_stuck(STORE_LOST, own, None)

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

    def _listen(self) -> None:
        noted, note_s = 0.0, self._alarms.num_ranks / NOTES_PER_S
        try:
            while not self._closed.is_set():
                if self._asked.wait(LOOK_S) or self._alarms.is_raised():
                    self._answer()
                if time.monotonic() - noted > note_s:
                    noted = time.monotonic()
                    self._alarms.note(self._where())
        except RuntimeError:
            return  # the store is gone: the timer goes on alone

    def _answer(self) -> None:
        if self._closed.is_set():
            return
        own = self._report()
        self._tell(own)
        found = self._alarms.answer(own)
        self._settled.set()
        found = found or "a rank raised the alarm and left before it could say who did not come"
        self._on_stuck(found, own, self._alarms.linger)

    def _is_late(self) -> bool:
        """Return whether this rank has got no further for longer than it may."""
        now = time.monotonic()
        stopped_s, self._looked = now - self._looked - LOOK_S, now
        self._update(now)
        if stopped_s > STOPPED_S:
            self._since = min(now, self._since + stopped_s)
        if now - self._since <= self.limit_s:
            return False
        self._since = max(self._since, now - diagnosis.idle_s())
        return now - self._since > self.limit_s

    def _update(self, now: float) -> None:
        exchange = self.exchange
        count = self.progress, len(exchange.waits), communicator.number_together()
        state = State(self._where(), exchange.action, exchange.waiting, communicator.doing_together(), count)
        if state != self._seen:
            self._seen, self._since = state, now

    def _report(self) -> Report:
        """Return what this rank is at: whether it waits, for whom, for how long, in which line of the program."""
        self._update(time.monotonic())
        state, frame = self._seen, diagnosis.main_frame()
        assert state is not None
        since_s = time.monotonic() - self._since
        operation = diagnosis.communication(frame)
        ranks = self.exchange.links.ranks if self.exchange.links else ()
        own = report(state.phase, state.action, state.waiting, state.together, since_s, ranks)
        words = own.words
        if own.is_waiting or state.action is not None:
            words += f", {state.phase.partition(', ')[0]}"
        if operation is not None and not own.is_waiting:
            words += f", waiting in {operation}"
        is_waiting = own.is_waiting or operation is not None or self._is_busy()
        return Report(is_waiting, own.waits_for, since_s, f"{words}, at {diagnosis.told_place(frame)}")

    def _tell(self, own: Report) -> None:
        """Write what this rank is at."""
        told = [f"{self._name} {own.words}", diagnosis.told(self._groups)]
        if self.exchange.history:
            told.append(told_messages(self.exchange.history))
        tell("; ".join(told), own)
