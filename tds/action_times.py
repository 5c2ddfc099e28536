"""Recorded times of pipeline actions.

The stage calls ``before`` and ``after`` around each action of the steps that somebody wants to see, and nothing in
others. Both only take marks; what they are in seconds is asked at the end of the step.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tds.clocks import Clock
from tds.schedule import LOOP, Action, Backward, BackwardInput, BackwardWeight, Costs, Forward, Placement

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
