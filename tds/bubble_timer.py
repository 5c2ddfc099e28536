"""Measured bubble: the idle fraction of a step. It needs no trace.

For each training step, a stage records three times: its first action's start, its last action's end, and the total wait
for messages in between. A step lasts from the first action's start on stage 0 to the last action's end on any stage.
The time from a stage's end to the slowest stage's end thus counts as idle, as in the closed form
``(p - 1) / (m + p - 1)``.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from tds.clocks import Clock, offset_to_wall_ns

MAX_STEPS = 1000
Row = tuple[int, int, int]
"""(start, end, total wait) for one step on one stage, in nanoseconds on a clock that all stages share."""


class BubbleTimer:
    """Stores one stage's last step times for several independent readers."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._offset_ns = offset_to_wall_ns()
        self._rows: deque[Row] = deque(maxlen=MAX_STEPS)
        self._num_steps = 0
        self._num_read: dict[str, int] = {}
        self._pending: tuple[Any, Any, list[tuple[Any, Any]]] | None = None

    def record(self, start: Any, end: Any, waits: list[tuple[Any, Any]]) -> None:
        """Store the marks around a step's actions and its waits for messages, without waiting for the device."""
        self._resolve()  # the previous step has completed by now
        self._pending = start, end, waits

    def drain(self, reader: str = "program") -> list[Row]:
        """Return one row per step since this reader's last call; only the last ``MAX_STEPS`` steps are stored."""
        self._resolve()
        num_new = self._num_steps - self._num_read.get(reader, 0)
        self._num_read[reader] = self._num_steps
        self._clock.align()
        return list(self._rows)[-num_new:] if num_new else []

    def _resolve(self) -> None:
        if self._pending is None:
            return
        (start, end, waits), self._pending = self._pending, None
        clock = self._clock
        wait_ns = sum(clock.nanoseconds(wait_end) - clock.nanoseconds(wait_start) for wait_start, wait_end in waits)
        start_end = clock.nanoseconds(start) + self._offset_ns, clock.nanoseconds(end) + self._offset_ns
        self._rows.append((*start_end, wait_ns))
        self._num_steps += 1
        clock.free((start, end, *(mark for pair in waits for mark in pair)))
