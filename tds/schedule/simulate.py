"""A schedule run with the times of its actions: the time line of each stage and its bubble."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from tds.schedule.actions import Action
from tds.schedule.costs import Costs
from tds.schedule.running import Channel, Content, run


@dataclass(frozen=True, slots=True)
class Span:
    """When one action ran, in the unit of the costs since the step began."""

    action: Action
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Timeline:
    """What each stage did when, planned or measured; what is no span is idle."""

    spans: tuple[tuple[Span, ...], ...]

    @property
    def num_stages(self) -> int:
        return len(self.spans)

    @cached_property
    def step_s(self) -> float:
        """The time from the step's begin to the end of the last action."""
        return max((span.end_s for stage in self.spans for span in stage), default=0.0)

    @cached_property
    def busy_s(self) -> tuple[float, ...]:
        """The time of its actions, for each stage."""
        return tuple(sum(span.end_s - span.start_s for span in stage) for stage in self.spans)

    @property
    def idle_s(self) -> tuple[float, ...]:
        """The time without an action, for each stage."""
        return tuple(self.step_s - busy for busy in self.busy_s)

    @property
    def bubble(self) -> float:
        """The share of idle time in the step over all stages."""
        return 1 - sum(self.busy_s) / (self.num_stages * self.step_s) if self.step_s else 0.0


def simulate(stages: Sequence[Sequence[Action]], costs: Costs, num_chunks: int = 1) -> Timeline:
    """Return the time line of a schedule in which each action begins as soon as its stage and its message allow.

    Messages travel beside the work of both sides, each ``costs.transfer`` long.

    Raises:
        ScheduleError: the schedule cannot run.
        ValueError: ``costs`` are not those of ``len(stages) * num_chunks`` pieces.
    """
    num_stages = len(stages)
    if costs.num_pieces != num_stages * num_chunks:
        raise ValueError(
            f"costs must be given for each piece, {num_stages} stages x {num_chunks} chunks = "
            f"{num_stages * num_chunks}, got {costs.num_pieces}"
        )
    spans: list[list[Span]] = [[] for _ in stages]
    free_at = [0.0] * num_stages
    arrives_at: dict[tuple[Channel, Content], float] = {}
    for event in run(stages, num_chunks):
        start = free_at[event.stage]
        if event.source is not None and event.takes is not None:
            start = max(start, arrives_at.pop((event.source, event.takes)))
        end = start + costs.of(event.action, event.action.chunk * num_stages + event.stage)
        if event.target is not None and event.sends is not None:
            arrives_at[event.target, event.sends] = end + costs.transfer
        free_at[event.stage] = end
        spans[event.stage].append(Span(event.action, start, end))
    return Timeline(tuple(map(tuple, spans)))
