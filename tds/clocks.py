"""Host clock and device-event clock with one interface.

A mark costs well under a microsecond on the host and about one on a GPU, where it is an event on the current stream;
neither waits for anything. What lies between marks is asked later, when the work is done.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

import torch

from tds.device import current, finish_stream, has_events, timing_event


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
