"""The choice between schedules by the step time that their simulation predicts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tds.schedule.costs import Costs
from tds.schedule.running import ScheduleError
from tds.schedule.simulate import Timeline, simulate
from tds.schedule.sizes import Order
from tds.schedule.validate import validate

SAME = 1e-6
"""Step times that differ by a smaller part than this are equal."""


@dataclass(frozen=True)
class Choice:
    """The schedule to run, and why.

    ``peaks`` has for each candidate the most forwards that one stage has in flight.
    """

    name: str
    timelines: Mapping[str, Timeline]
    peaks: Mapping[str, int]
    reason: str


def choose(
    candidates: Mapping[str, Order], costs: Costs, num_stages: int, num_micro_batches: int, num_chunks: int = 1
) -> Choice:
    """Return the candidate with the shortest predicted step; among equals the one with the least in flight.

    Raises:
        ScheduleError: a candidate cannot run; its name is told.
        ValueError: there are no candidates, or ``costs`` are not those of all pieces.
    """
    if not candidates:
        raise ValueError("choose needs at least one schedule, got none")
    timelines: dict[str, Timeline] = {}
    peaks: dict[str, int] = {}
    for name, order in candidates.items():
        try:
            stages = [order(num_stages, num_micro_batches, stage) for stage in range(num_stages)]
            peaks[name] = max(validate(stages, num_micro_batches, num_chunks=num_chunks))
        except ScheduleError as error:
            raise ScheduleError(f"the schedule {name} cannot run: {error}") from error
        timelines[name] = simulate(stages, costs, num_chunks)
    best = min(timeline.step_s for timeline in timelines.values())
    fastest = [name for name in timelines if timelines[name].step_s <= best * (1 + SAME)]
    chosen = min(fastest, key=lambda name: peaks[name])
    return Choice(chosen, timelines, peaks, _reason(chosen, fastest, timelines, peaks))


def _reason(chosen: str, fastest: list[str], timelines: Mapping[str, Timeline], peaks: Mapping[str, int]) -> str:
    """Tell the step time of the choice, and those of the others or what else decided."""
    longest = max(timeline.step_s for timeline in timelines.values())
    unit, factor = ("s", 1.0) if longest >= 1 else ("ms", 1e3)
    told = {name: f"{timeline.step_s * factor:.3g}" for name, timeline in timelines.items()}
    reason = f"{chosen}: predicted {told[chosen]} {unit} a step"
    others = sorted((name for name in timelines if name != chosen), key=lambda name: timelines[name].step_s)
    if others:
        reason += " against " + ", ".join(f"{told[name]} ({name})" for name in others)
    tied = [name for name in fastest if name != chosen]
    if tied:
        held = ", ".join(f"{peaks[name]} ({name})" for name in tied)
        reason += f"; it holds {peaks[chosen]} micro-batches in flight, against {held}"
    return reason
