"""Measured bubble: the share of a step in which stages are idle.

No tracing is needed.

For each training step a stage keeps three numbers: when its first action began, when its last one ended, and how long
it waited for messages in between. A step lasts from the first stage's first action to the last end anywhere, so a
stage that is done early idles until the slowest is done, as in the closed forms ``(p - 1) / (m + p - 1)``.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from tds.clocks import Clock, offset_to_wall_ns

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
