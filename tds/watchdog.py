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

import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from tds import peers
from tds.verdict import Report, State, report, told_messages, verdict

POLL_S = 0.2
GATHER_S = 0.7
LINGER_S = 0.4
PATIENCE_S = 1.6
"""After the alarm: for the answers; for the others to read the verdict; for the verdict itself."""
GRACE_S = 1.0
"""The thread raises the alarm itself this long after the limit, where a wait cannot time out (on GPUs)."""
OUTSIDE = "outside of train_batch and eval_batch"


class Watchdog:
    """Watches one rank of an engine.

    Args:
        exchange: tells ``action``, ``waiting``, ``history`` and ``links``.
        store: for this engine alone; None: say what this rank knows, without asking others.
        names: of every rank, for messages.
        limit_s: longer waits raise the alarm.
    """

    def __init__(self, exchange: Any, store: Any, rank: int, names: Sequence[str], limit_s: float) -> None:
        self._exchange, self._store = exchange, store
        self._rank, self._names, self._limit_s = rank, names, limit_s
        self._phase = OUTSIDE
        self._seen: State | None = None
        self._since = time.monotonic()
        self._answered: State | None = None
        self._alarm = 0
        self._number = 0
        self._lock = threading.Lock()
        self._asked = self._has_told = False
        self._heard = threading.Event()
        self._done = threading.Event()
        self._wake = threading.Event()
        self._verdict: str | None = None
        self._is_cut_off: str | None = None
        self._thread = threading.Thread(
            target=_watch, args=(weakref.ref(self), self._wake), name="tds watchdog", daemon=True
        )
        if store is not None:
            self._thread.start()

    @contextmanager
    def over(self, phase: str) -> Iterator[None]:
        """Watch what is done within; let an error of a peer that is lost name the one who did not come."""
        peers.remember_in(self._exchange.history)
        self._phase = phase
        try:
            yield
        except RuntimeError as error:
            told = self._explain(error)
            if told is None:
                raise
            raise RuntimeError(f"{told}. {error}") from error
        finally:
            self._phase = OUTSIDE
            self._forget()

    def _forget(self) -> None:
        """Begin anew: what comes has nothing to do with what an error has left, or with an alarm heard until here."""
        peers.forget()
        self._exchange.waiting = None
        with self._lock:
            self._number += 1
            self._asked = self._has_told = False
            self._verdict = None
            self._heard.clear()
            self._done.clear()

    def _explain(self, error: RuntimeError) -> str | None:
        """Return who did not come, if ``error`` is a wait that timed out or comes of another's."""
        if " lost " not in str(error) or not (is_timeout(error) or self._heard.is_set()):
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
        try:
            is_asked = self._asked and not self._done.is_set()
            if is_asked or self._is_late() or self._store.check([f"{self._alarm}/alarm"]):
                self._answer()
        except RuntimeError as error:
            self._is_cut_off = f"the process group's store is gone, with its host, rank 0 or the launcher ({error})"
            self._done.set()
        return self._is_cut_off is None

    def _is_late(self) -> bool:
        """True once for each wait that lasts for too long."""
        waited_s = self._waited_s()
        return waited_s > self._limit_s + GRACE_S and self._seen != self._answered

    def _answer(self) -> None:
        """Say what this rank is at, and find or fetch the verdict of this alarm."""
        store, number, found = dist.PrefixStore(str(self._alarm), self._store), self._number, None
        is_first = not store.check(["alarm"]) and store.add("alarm", 1) == 1
        self._heard.set()
        own = self._report()
        self._answered = self._seen
        store.set(f"report/{self._rank}", own.encode())
        self._tell(own)
        if is_first:
            reports = self._gather(store)
            store.set("number", str(len(reports)))
            store.set("verdict", verdict(reports, self._names, self._rank))
        if _until(lambda: store.check(["verdict"]), PATIENCE_S - POLL_S):
            found = store.get("verdict").decode()
            readers = int(store.get("number"))
            store.add("read", 1)
            _until(lambda: store.add("read", 0) >= readers, LINGER_S)  # one of these ranks may be the store's host
        self._alarm += 1
        with self._lock:
            if number == self._number:  # else what it was about is over
                self._verdict = found
                self._done.set()

    def _gather(self, store: Any) -> dict[int, Report]:
        """Return what the ranks say of themselves within ``GATHER_S``."""
        reports: dict[int, Report] = {}
        missing = set(range(len(self._names)))

        def has_everyone_told() -> bool:
            for rank in list(missing):
                if store.check([f"report/{rank}"]):
                    reports[rank] = Report.decode(store.get(f"report/{rank}"))
                    missing.discard(rank)
            return not missing

        _until(has_everyone_told, GATHER_S)
        return reports

    def _state(self) -> State:
        exchange, phase = self._exchange, self._phase
        count = self._number, len(exchange.waits), peers.number_together()
        action = None if phase == OUTSIDE else exchange.action
        return State(phase, action, exchange.waiting, peers.doing_together(), count)

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
        """Write this rank's one line to standard error in one call, so that lines of several ranks do not mix."""
        if self._has_told:
            return
        self._has_told = True
        messages = told_messages(self._exchange.history)
        sys.stderr.write(f"tds watchdog: {self._names[self._rank]} {own.words}; {messages}\n")
        sys.stderr.flush()


def _watch(watchdog: weakref.ref[Watchdog], wake: threading.Event) -> None:
    """Look again and again until the watchdog is gone with its engine, which the thread must not keep alive."""
    is_on = True
    while is_on:
        wake.wait(POLL_S)
        wake.clear()
        present = watchdog()
        is_on = present is not None and present.look()
        del present


def is_timeout(error: BaseException) -> bool:
    """True if ``error``, or what it came from, is a wait that took too long."""
    cause: BaseException | None = error
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


def own_store(run: str) -> Any:
    """Return a connection to the store of the default process group, under the prefix ``run``; None if it has none."""
    try:
        store: Any = distributed_c10d._get_default_store()
    except (RuntimeError, ValueError):
        return None
    copy = dist.PrefixStore(f"tds/watchdog/{run}", store.clone())
    copy.set_timeout(timedelta(seconds=PATIENCE_S))
    return copy


def _until(condition: Callable[[], bool], limit_s: float) -> bool:
    end = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True
