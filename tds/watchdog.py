"""A watchdog that says who did not come when a rank has waited too long.

Each rank has a daemon thread with a connection of its own to the process group's store, because the main thread is
stuck in a wait then. A rank whose wait times out raises an alarm in the store. The threads, which look there five
times a second, print one line each and leave in the store what their rank is at; so a rank that is stuck in a user's
code answers, and one that was stopped does not. The one that raised the alarm reads the answers and writes down who
did not come, and every rank's error says so. A store that does not answer is itself the news: its host is gone.

Alarms are numbered: an engine whose program caught the error, or that was only late (on GPUs nothing ends a wait that
takes long), is watched on, and the next alarm finds a verdict of its own.

A rank that dies closes its connections, so its neighbours fail at once, and theirs after them: no alarm is raised.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from tds import peers
from tds.alarm import PATIENCE_S, POLL_S, Alarms, tell
from tds.verdict import Report, State, report, told_messages

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
        self._together = peers.Together(exchange.history)
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
            raise peers.PeerLost(f"{told}. {error}") from error
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
        count = self._number, len(exchange.waits), peers.number_together()
        action = None if phase == OUTSIDE else exchange.action
        together = (peers.outside if phase == OUTSIDE else self._together).doing
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


def peer_lost(error: BaseException | None) -> peers.PeerLost | None:
    """Return the first error in the chain of causes that says that a peer is lost; None if none does."""
    while error is not None and not isinstance(error, peers.PeerLost):
        error = error.__cause__
    return error


def is_timeout(lost: peers.PeerLost) -> bool:
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
