"""Host and CUDA-event timers, the measured bubble, durations of actions."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tds.device import current, finish_stream, has_events, timing_event
from tds.schedule import LOOP, Action, Backward, BackwardInput, BackwardWeight, Costs, Forward, Placement

# Two clocks with one face: the host's for work on a CPU, events for work that a device has in a queue.
#
# A mark costs well under a microsecond on the host and about one on a GPU, where it is an event on the current stream;
# neither waits for anything. What lies between marks is asked later, when the work is done.


class HostClock:
    """Marks are nanoseconds of the monotonic clock that all processes of a host share."""

    mark = staticmethod(time.perf_counter_ns)

    def seconds(self, before: int, after: int) -> float:
        """Return the time between two marks."""
        return (after - before) * 1e-9

    def nanoseconds(self, mark: int) -> int:
        """Return when ``mark`` was, in nanoseconds of the host's monotonic clock."""
        return mark

    def is_reached(self, mark: int) -> bool:
        """True: the host has done what it marks."""
        return True

    def align(self) -> None:
        """Do nothing: this is the host's clock."""

    def free(self, marks: Iterable[int]) -> None:
        """Do nothing: marks are numbers."""


class EventClock:
    """Marks are events on the current stream, taken from a pool and given back by ``free``."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._free: list[Any] = []
        self.align()

    def mark(self) -> Any:
        """Return an event that is reached when the work queued so far is done."""
        event = self._free.pop() if self._free else timing_event(self.device)
        event.record()
        return event

    def seconds(self, before: Any, after: Any) -> float:
        """Return the time between two marks. Waits until the later one is reached."""
        after.synchronize()
        return before.elapsed_time(after) * 1e-3

    def nanoseconds(self, mark: Any) -> int:
        """Return when ``mark`` was reached, in nanoseconds of the host's monotonic clock. Waits until it is."""
        return self._aligned_ns + round(self.seconds(self._aligned, mark) * 1e9)

    def is_reached(self, mark: Any) -> bool:
        """True if the device has done all that was queued ahead of ``mark``."""
        return mark.query()

    def align(self) -> None:
        """Note an event and the host's time at one moment, to which ``nanoseconds`` refers. Waits for the stream.

        Events count milliseconds in 32 bits and drift from the host's clock, so long runs align again now and then.
        """
        with current(self.device):
            self._aligned = timing_event(self.device)
            finish_stream(self.device)
            self._aligned.record()
            self._aligned.synchronize()
            self._aligned_ns = time.perf_counter_ns()

    def free(self, marks: Iterable[Any]) -> None:
        """Take back marks that nobody will ask for any more."""
        self._free.extend(marks)


Clock = HostClock | EventClock


def clock_for(device: torch.device) -> Clock:
    """Return the clock of the work on ``device``."""
    return EventClock(device) if has_events(device) else HostClock()


def offset_to_wall_ns() -> int:
    """Return what to add to the monotonic clock so that times of several hosts compare as well as their wall clocks."""
    narrowest = None
    offset = 0
    for _ in range(5):
        before = time.perf_counter_ns()
        wall = time.time_ns()
        after = time.perf_counter_ns()
        if narrowest is None or after - before < narrowest:
            narrowest, offset = after - before, wall - (before + after) // 2
    return offset


# Times of the actions of a step: what a trace is made of, and what "auto" measures.
#
# The stage calls ``before`` and ``after`` around each action of the steps that somebody wants to see, and nothing in
# others. Both only take marks; what they are in seconds is asked at the end of the step.

Durations = dict[tuple[type[Action], int], list[float]]
"""The seconds of each action of a kind and chunk of one stage."""


@dataclass(frozen=True)
class Work:
    """One action as it was, in nanoseconds of the host's monotonic clock, with its waits for messages."""

    action: Action
    began_ns: int
    ended_ns: int
    waits: tuple[tuple[int, int], ...] = ()

    @property
    def started_ns(self) -> int:
        """When the last message that it waited for was there."""
        return self.waits[-1][1] if self.waits else self.began_ns

    @property
    def work_ns(self) -> int:
        """Its time without the waits; reading data ahead of a wait counts as work."""
        return self.ended_ns - self.began_ns - sum(after - before for before, after in self.waits)


class Recorder:
    """Marks around the actions of one step at a time.

    Args:
        exchange: has ``clock`` and ``waits``, the pairs of marks around each wait for a message.
    """

    def __init__(self, exchange: Any) -> None:
        self._exchange = exchange
        self._began: Any = None
        self._num_waits = 0
        self._marks: list[tuple[Action, Any, Any, list[tuple[Any, Any]]]] = []

    def before(self) -> None:
        """Note that an action begins."""
        exchange = self._exchange
        self._num_waits = len(exchange.waits)
        self._began = exchange.clock.mark()

    def after(self, action: Action) -> None:
        """Note that ``action`` has ended."""
        exchange = self._exchange
        self._marks.append((action, self._began, exchange.clock.mark(), exchange.waits[self._num_waits :]))

    def take(self, *, is_whole: bool = True) -> list[Work]:
        """Return what was recorded since the last call. Waits until it is done on the device.

        Args:
            is_whole: False after an error: what the device has not reached is left out instead.
        """
        marks, self._marks = self._marks, []
        clock = self._exchange.clock
        if not is_whole:
            marks = [each for each in marks if clock.is_reached(each[2])]
        work = [_resolve(clock, *each) for each in marks]
        for _, began, ended, _ in marks:
            clock.free((began, ended))
        return work


def _resolve(clock: Clock, action: Action, began: Any, ended: Any, waits: list[tuple[Any, Any]]) -> Work:
    at = clock.nanoseconds
    return Work(action, at(began), at(ended), tuple((at(before), at(after)) for before, after in waits))


def durations_of(work: Iterable[Work]) -> Durations:
    """Return the seconds of work of one stage, by kind of action and chunk."""
    durations: Durations = {}
    for each in work:
        durations.setdefault((type(each.action), each.action.chunk), []).append(each.work_ns * 1e-9)
    return durations


def medians(durations: Durations) -> dict[tuple[type[Action], int], float]:
    """Return the median seconds of each kind of action and chunk."""
    return {key: statistics.median(seconds) for key, seconds in durations.items()}


def costs_of(
    stages: Sequence[Mapping[tuple[type[Action], int], float]], num_chunks: int, placement: str = LOOP
) -> Costs:
    """Return the costs of the pieces, from the seconds of each kind of action and chunk of each stage.

    Where no backward is split a whole one counts as ``backward_input``, with nothing left for the weights.
    """
    lie = Placement(len(stages), num_chunks, placement)
    pieces = [(stages[lie.stage_of(piece)], piece // len(stages)) for piece in range(lie.num_pieces)]
    to_input = [stage.get((BackwardInput, chunk), stage.get((Backward, chunk), 0.0)) for stage, chunk in pieces]
    to_weight = [stage.get((BackwardWeight, chunk), 0.0) for stage, chunk in pieces]
    whole = [
        stage.get((Backward, chunk), sum(halves))
        for (stage, chunk), halves in zip(pieces, zip(to_input, to_weight, strict=True), strict=True)
    ]
    return Costs(
        forward=tuple(stage.get((Forward, chunk), 0.0) for stage, chunk in pieces),
        backward_input=tuple(to_input),
        backward_weight=tuple(to_weight),
        backward=tuple(whole),
    )


# The measured bubble: the share of a step in which stages had nothing to do. No tracing is needed.
#
# For each training step a stage keeps three numbers: when its first action began, when its last one ended, and how long
# it waited for messages in between. A step lasts from the first stage's first action to the last end anywhere, so a
# stage that is done early idles until the slowest is done, as in the closed forms ``(p - 1) / (m + p - 1)``.

KEPT_STEPS = 1000
Row = tuple[int, int, int]
"""(began, ended, waited) of one step on one stage, in nanoseconds of a clock that all stages share."""


class BubbleTimer:
    """Keeps the times of the last steps of one stage, for several readers that do not know of each other."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._offset_ns = offset_to_wall_ns()
        self._rows: deque[Row] = deque(maxlen=KEPT_STEPS)
        self._number = 0
        self._read: dict[str, int] = {}
        self._pending: tuple[Any, Any, list[tuple[Any, Any]]] | None = None

    def note(self, began: Any, ended: Any, waits: list[tuple[Any, Any]]) -> None:
        """Take the marks of a step: around its actions, and around each wait for a message. Waits for nothing."""
        self._resolve()  # the step before this one is done by now
        self._pending = began, ended, waits

    def drain(self, reader: str = "program") -> list[Row]:
        """Return the rows of the steps since this reader's last call, of the last ``KEPT_STEPS``."""
        self._resolve()
        new = self._number - self._read.get(reader, 0)
        self._read[reader] = self._number
        self._clock.align()
        return list(self._rows)[-new:] if new else []

    def _resolve(self) -> None:
        if self._pending is None:
            return
        (began, ended, waits), self._pending = self._pending, None
        clock = self._clock
        waited = sum(clock.nanoseconds(after) - clock.nanoseconds(before) for before, after in waits)
        at = clock.nanoseconds(began) + self._offset_ns, clock.nanoseconds(ended) + self._offset_ns
        self._rows.append((*at, waited))
        self._number += 1
        clock.free((began, ended, *(mark for pair in waits for mark in pair)))
