"""Recorded action times.

In recorded steps, the stage calls ``before`` and ``after`` around each action. Both only take clock marks, which are
converted to times when the step ends.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tds.clocks import Clock
from tds.schedule import LOOP, Action, Backward, BackwardInput, BackwardWeight, Costs, Forward, Placement

Durations = dict[tuple[type[Action], int], list[float]]
"""(action type, chunk) -> durations in seconds on one stage."""


@dataclass(frozen=True)
class Work:
    """Measured times of one action and its waits for messages, in nanoseconds of the host's monotonic clock."""

    action: Action
    start_ns: int
    end_ns: int
    waits: tuple[tuple[int, int], ...] = ()

    @property
    def compute_start_ns(self) -> int:
        """Arrival time of the last awaited message; the start of the action if it did not wait."""
        return self.waits[-1][1] if self.waits else self.start_ns

    @property
    def work_ns(self) -> int:
        """Duration without the waits. Reading data before a wait counts as work."""
        return self.end_ns - self.start_ns - sum(after - before for before, after in self.waits)


class Recorder:
    """Records clock marks around one step's actions.

    Args:
        communicator: the stage's ``P2PCommunicator``. The recorder reads its ``clock`` and its ``waits``.
    """

    def __init__(self, communicator: Any) -> None:
        self._communicator = communicator
        self._start: Any = None
        self._num_waits = 0
        self._marks: list[tuple[Action, Any, Any, list[tuple[Any, Any]]]] = []

    def before(self) -> None:
        """Mark the start of an action."""
        communicator = self._communicator
        self._num_waits = len(communicator.waits)
        self._start = communicator.clock.mark()

    def after(self, action: Action) -> None:
        """Mark the end of ``action``."""
        communicator = self._communicator
        self._marks.append((action, self._start, communicator.clock.mark(), communicator.waits[self._num_waits :]))

    def drain(self, *, is_complete: bool = True) -> list[Work]:
        """Return the actions recorded since the last call, after waiting for the device.

        Args:
            is_complete: False after an error: omit the actions that the device has not reached, instead of waiting.
        """
        marks, self._marks = self._marks, []
        clock = self._communicator.clock
        if not is_complete:
            marks = [mark for mark in marks if clock.is_reached(mark[2])]
        work = [_resolve(clock, *mark) for mark in marks]
        for _, start, end, _ in marks:
            clock.free((start, end))
        return work


def _resolve(clock: Clock, action: Action, start: Any, end: Any, waits: list[tuple[Any, Any]]) -> Work:
    to_ns = clock.nanoseconds
    return Work(action, to_ns(start), to_ns(end), tuple((to_ns(before), to_ns(after)) for before, after in waits))


def durations_of(work: Iterable[Work]) -> Durations:
    """Group the durations of one stage's actions by action type and chunk."""
    durations: Durations = {}
    for item in work:
        durations.setdefault((type(item.action), item.action.chunk), []).append(item.work_ns * 1e-9)
    return durations


def medians(durations: Durations) -> dict[tuple[type[Action], int], float]:
    """Return the median durations in seconds."""
    return {key: statistics.median(seconds) for key, seconds in durations.items()}


def costs_of(
    stages: Sequence[Mapping[tuple[type[Action], int], float]], num_chunks: int, placement: str = LOOP
) -> Costs:
    """Compute the costs of all virtual stages from action times.

    If a virtual stage splits no backward, its full backward counts as ``backward_input``, and ``backward_weight``
    is 0.

    Args:
        stages: for each stage, seconds by action type and chunk.
    """
    chunk_placement = Placement(len(stages), num_chunks, placement)
    stage_chunks = [
        (stages[chunk_placement.stage_of(virtual_stage)], virtual_stage // len(stages))
        for virtual_stage in range(chunk_placement.num_virtual_stages)
    ]
    backward_input = [
        stage.get((BackwardInput, chunk), stage.get((Backward, chunk), 0.0)) for stage, chunk in stage_chunks
    ]
    backward_weight = [stage.get((BackwardWeight, chunk), 0.0) for stage, chunk in stage_chunks]
    backward = [
        stage.get((Backward, chunk), sum(halves))
        for (stage, chunk), halves in zip(stage_chunks, zip(backward_input, backward_weight, strict=True), strict=True)
    ]
    return Costs(
        forward=tuple(stage.get((Forward, chunk), 0.0) for stage, chunk in stage_chunks),
        backward_input=tuple(backward_input),
        backward_weight=tuple(backward_weight),
        backward=tuple(backward),
    )
