"""The measured bubble: the share of a step in which stages had nothing to do. No tracing is needed.

For each training step a stage keeps three numbers: when its first action began, when its last one ended, and how long
it waited for messages in between. A step lasts from the first stage's first action to the last end anywhere, so a
stage that is done early idles until the slowest is done, as in the closed forms ``(p - 1) / (m + p - 1)``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from tds.clock import Clock, offset_to_wall_ns
from tds.peers import waiting_together

KEPT_STEPS = 1000
Row = tuple[int, int, int]
"""(began, ended, waited) of one step on one stage, in nanoseconds of a clock that all stages share."""


class BubbleMeter:
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


def bubble_of(stages: Sequence[Sequence[Row]]) -> float | None:
    """Return the share of idle time over all stages and steps; None without a step."""
    idle_ns = total_ns = 0
    for rows in zip(*stages, strict=True):
        step_ns = max(row[1] for row in rows) - rows[0][0]
        busy_ns = sum(ended - began - waited for began, ended, waited in rows)
        total_ns += step_ns * len(rows)
        idle_ns += max(0, step_ns * len(rows) - busy_ns)
    return idle_ns / total_ns if total_ns else None


def gathered_bubble(rows: Sequence[Row], stage: int, group: Any, device: torch.device) -> float | None:
    """Return the bubble of the steps whose ``rows`` each stage brings. Collective over the pipeline's ``group``."""
    if dist.get_world_size(group) == 1:
        return bubble_of([rows])
    own = torch.tensor(rows, dtype=torch.int64, device=device).reshape(-1, 3)
    every = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    with waiting_together(stage, "gathering the times of the stages"):
        dist.all_gather(every, own, group=group)
    return bubble_of([[(int(b), int(e), int(w)) for b, e, w in each.tolist()] for each in every])
