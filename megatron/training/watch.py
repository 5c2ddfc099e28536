"""Who is stuck: each rank has two threads that see when it, or another, gets no further.

One looks at what its own main thread is at, three times a second, and needs nobody for it. Once that has not changed
for longer than the limit of the phase, it has the alarm raised. The other one speaks with the process group's store,
which may not answer: it hears the alarms of others, answers them, and learns who did not come (``tds.alarm``). Every
rank then says what it is at, with its last operations and, if it waits for nobody, its stack, and does what it is told
to do then: the run leaves with code 4.

Nothing is asked of the main thread but that it names its phase and counts its steps.
"""

from __future__ import annotations

import faulthandler
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from megatron.training import watch_record
from tds import peers, stacks
from tds.alarm import LINGER_S, PATIENCE_S, Alarms, tell
from tds.verdict import Report, State, report, told_messages

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
        self._since = max(self._since, now - watch_record.idle_s())
        return now - self._since > self.limit_s

    def _update(self, now: float) -> None:
        exchange = self.exchange
        count = self.progress, len(exchange.waits), peers.number_together()
        state = State(self._where(), exchange.action, exchange.waiting, peers.doing_together(), count)
        if state != self._seen:
            self._seen, self._since = state, now

    def _report(self) -> Report:
        """Return what this rank is at: whether it waits, for whom, for how long, in which line of the program."""
        self._update(time.monotonic())
        state, frame = self._seen, stacks.main_frame()
        assert state is not None
        since_s = time.monotonic() - self._since
        operation = stacks.communication(frame)
        ranks = self.exchange.links.ranks if self.exchange.links else ()
        own = report(state.phase, state.action, state.waiting, state.together, since_s, ranks)
        words = own.words
        if own.is_waiting or state.action is not None:
            words += f", {state.phase.partition(', ')[0]}"
        if operation is not None and not own.is_waiting:
            words += f", waiting in {operation}"
        is_waiting = own.is_waiting or operation is not None or self._is_busy()
        return Report(is_waiting, own.waits_for, since_s, f"{words}, at {stacks.told_place(frame)}")

    def _tell(self, own: Report) -> None:
        """Write what this rank is at."""
        told = [f"{self._name} {own.words}", watch_record.told(self._groups)]
        if self.exchange.history:
            told.append(told_messages(self.exchange.history))
        tell("; ".join(told), own)
