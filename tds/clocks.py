"""Clocks with one interface for host work and queued device work.

A mark takes well under a microsecond on the host, and about one on a GPU, where it is an event on the current stream.
Taking a mark never waits. The time between marks is computed later, once the work is done.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

import torch

from tds.device import device_context, has_events, synchronize_stream, timing_event


class HostClock:
    """Clock whose marks are nanoseconds on the monotonic clock that a host's processes share."""

    mark = staticmethod(time.perf_counter_ns)

    def seconds(self, before: int, after: int) -> float:
        return (after - before) * 1e-9

    def nanoseconds(self, mark: int) -> int:
        return mark

    def is_reached(self, mark: int) -> bool:
        """Host work is done when a mark is taken."""
        return True

    def align(self) -> None:
        """Do nothing, because this is the host's clock."""

    def free(self, marks: Iterable[int]) -> None:
        """Do nothing, because marks are ints."""


class EventClock:
    """Clock whose marks are events on the current stream, taken from a pool and returned to it by ``free``."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._pool: list[Any] = []
        self.align()

    def mark(self) -> Any:
        """Record and return an event that is reached when all work queued so far is done."""
        event = self._pool.pop() if self._pool else timing_event(self.device)
        event.record()
        return event

    def seconds(self, before: Any, after: Any) -> float:
        """Wait for the later mark and return the seconds between both."""
        after.synchronize()
        return before.elapsed_time(after) * 1e-3

    def nanoseconds(self, mark: Any) -> int:
        """Wait for ``mark`` and return when it was reached, in nanoseconds on the host's monotonic clock."""
        return self._reference_ns + round(self.seconds(self._reference_event, mark) * 1e9)

    def is_reached(self, mark: Any) -> bool:
        """Return True if the device has done all work queued before ``mark``."""
        return mark.query()

    def align(self) -> None:
        """Record an event and the host's time together, as reference for ``nanoseconds``. Waits for the stream.

        Events count milliseconds as 32-bit floats and drift from the host's clock, so long runs align repeatedly.
        """
        with device_context(self.device):
            self._reference_event = timing_event(self.device)
            synchronize_stream(self.device)
            self._reference_event.record()
            self._reference_event.synchronize()
            self._reference_ns = time.perf_counter_ns()

    def free(self, marks: Iterable[Any]) -> None:
        """Put ``marks``, which are no longer needed, back into the pool."""
        self._pool.extend(marks)


Clock = HostClock | EventClock


def clock_for(device: torch.device) -> Clock:
    """Create a clock for work on ``device``."""
    return EventClock(device) if has_events(device) else HostClock()


def offset_to_wall_ns() -> int:
    """Measure the offset from the monotonic to the wall clock, which makes several hosts' times comparable."""
    min_width_ns = None
    offset = 0
    for _ in range(5):
        start_ns = time.perf_counter_ns()
        wall_ns = time.time_ns()
        end_ns = time.perf_counter_ns()
        if min_width_ns is None or end_ns - start_ns < min_width_ns:
            min_width_ns, offset = end_ns - start_ns, wall_ns - (start_ns + end_ns) // 2
    return offset
