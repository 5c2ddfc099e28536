"""Step times: closed forms, simulation with costs, and the fastest schedule; schedule names and defaults."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from tds.schedule.actions import LOOP, Action, Backward, BackwardInput, Forward, Order, Placement, V
from tds.schedule.schedule_file import read_schedule
from tds.schedule.schedules import schedule_named
from tds.schedule.v_schedules import dual_pipe_v, zero_bubble_v
from tds.schedule.validate import Channel, Content, ScheduleError, run, validate

# Closed forms for step time, idle time and forwards in flight.
#
# A stage has ``c`` chunks, each of which is a virtual stage (``tds.schedule.actions.Placement``). F, B and W are the
# times of a forward, a backward for the input and a backward for the weights; T = F + B + W per stage.
#
# | schedule | c | in flight on stage i | step time for m micro-batches | idle fraction at equal T |
# |---|---|---|---|---|
# | 1f1b | 1 | min(p - i, m) | m max(T) + sum(T) - max(T) | (p - 1) / (m + p - 1) |
# | gpipe | 1 | m | the same | the same |
# | zb-h1 | 1 | min(p, m) | m max(T) + (sum(T) - max(T)) / 3 at F = B = W | (p - 1) / (3 m + p - 1) |
# | interleaved | >1 | 2 (p - i - 1) + (c - 1) p + 1 chunks | m max(T) + (sum(T) - max(T)) / c | (p - 1) / (c m + p - 1) |  # noqa: E501
# | zb-h1 | >1 | i chunks more | m max(T) + (sum(T) - max(T)) / (3 c) at F = B = W | (p - 1) / (3 c m + p - 1) |
# | zb-v | 2 | min(2 p, i + 1 + m) chunks | m max(T) + (p - 1) mean(T) / 6 at F = B = W | (p - 1) / (6 m + p - 1) |
# | dualpipev | 2 | min(2 p + 1, i + 1 + m) chunks | m max(T) + (p - 1) mean(T) / 6 at F = B = W | (p - 1) / (6 m + p - 1) |  # noqa: E501
#
# The formulas in the rows below gpipe assume enough micro-batches:
#
# * zb-h1 and interleaved assume m >= p. Each micro-batch fewer adds max(T) / 3 to the step time in zb-h1, and
#   (c - 1) max(T) / c in interleaved.
# * With chunks, m should be a multiple of p. If m > p, each micro-batch that is missing to the next multiple of p adds
#   about two thirds of (c - 1) max(T) / c in interleaved, and about one third of it in zb-h1.
# * zb-v and dualpipev assume m >= 2 p. Each micro-batch fewer adds about mean(T) / 6, or mean(T) / 3 if m < p.
#
# All formulas assume that messages take no time. ``simulate`` computes step times with measured or given costs instead.
#
# Sources: Narayanan et al. 2021, "Efficient large-scale language model training on GPU clusters", section 2.2; Qi et
# al. 2023, "Zero bubble pipeline parallelism", section 2.

ONE_CHUNK = ("1f1b", "gpipe", "zb-h1")
MANY_CHUNKS = ("interleaved", "zb-h1")
V_SCHEDULES = ("zb-v", "dualpipev")
"""Schedules for two chunks per stage and the placement "v"; the others are for "loop"."""
SPLIT_SCHEDULES = ("zb-h1", *V_SCHEDULES)
"""Schedules that defer weight gradients."""
AUTO = "auto"
"""Name that selects the fastest schedule for the chunk placement, by measuring the first steps. "auto:" and a list of
names, such as "auto:1f1b,gpipe", restricts the choice to these schedules."""
SPLIT_OVERHEAD = 0.10
"""Relative extra time of a backward with deferred weight gradients on a CPU, measured on a stage with the head
(docs/experiments.md, row "5a29946 and after"). Not measured on other devices."""
SCHEDULES = (*dict.fromkeys((*ONE_CHUNK, *MANY_CHUNKS, *V_SCHEDULES)), AUTO)


FILE_PREFIX = "file:"
"""Prefix of a path that is given in place of a schedule's name (``tds.schedule.schedule_file``)."""


def schedule_path(schedule: str | None) -> str | None:
    """Return PATH for a schedule "file:PATH"; None for any other schedule."""
    return schedule.removeprefix(FILE_PREFIX) if schedule is not None and schedule.startswith(FILE_PREFIX) else None


def is_auto(schedule: str | None) -> bool:
    """Return True if ``schedule`` is "auto" or "auto:NAME,..."."""
    return schedule is not None and schedule.partition(":")[0] == AUTO


def auto_schedule_of(names: Sequence[str]) -> str:
    """Restrict "auto" to the schedules ``names``."""
    return f"{AUTO}:{','.join(names)}"


def placement_for(schedule: str | None) -> str:
    """Return a schedule's placement: "v" or "loop"; "loop" for "auto" and None."""
    if (path := schedule_path(schedule)) is not None:
        return read_schedule(path).placement.style
    return V if schedule in V_SCHEDULES else LOOP


def has_split_backwards(schedule: str) -> bool:
    """Return True if a schedule defers weight gradients."""
    if (path := schedule_path(schedule)) is not None:
        return read_schedule(path).has_split_backwards
    return schedule in SPLIT_SCHEDULES


def order_named(schedule: str, num_chunks: int, placement: str = LOOP, group_size: int = 0) -> Order:
    """Look up a schedule by its name or as "file:PATH"."""
    path = schedule_path(schedule)
    return schedule_named(schedule, num_chunks, placement, group_size) if path is None else read_schedule(path)


def default_schedule(num_chunks: int, placement: str = LOOP) -> str:
    """Return the default schedule's name."""
    return candidate_schedules(AUTO, num_chunks, placement)[0]


def candidate_schedules(schedule: str, num_chunks: int, placement: str = LOOP) -> tuple[str, ...]:
    """List the schedules that ``schedule`` may select: itself, or for "auto" those that fit the placement."""
    if not is_auto(schedule):
        return (schedule,)
    fitting = V_SCHEDULES if placement == V else MANY_CHUNKS if num_chunks > 1 else ONE_CHUNK
    requested = schedule.partition(":")[2]
    return tuple(name for name in fitting if not requested or name in requested.split(","))


def bubble(
    num_stages: int,
    num_micro_batches: int,
    schedule: str = "1f1b",
    num_chunks: int = 1,
    piece_costs: Sequence[float] | None = None,
) -> float:
    """Estimate a stage's mean idle fraction by the table above.

    With interleaved chunks of unequal cost, stages wait for each other. The time per micro-batch is then between the
    slowest stage's time and the sum over the chunks of their slowest virtual stages. The function uses the mean of
    both, which is wrong by a few percent.

    Args:
        piece_costs: T by virtual stage, in any unit; None: all equal.
    """
    p, m = num_stages, num_micro_batches
    chunk_costs = [1.0] * (p * num_chunks) if piece_costs is None else list(piece_costs)
    if (path := schedule_path(schedule)) is not None:
        file_schedule, times = read_schedule(path), tuple(chunk_costs)
        stages = [file_schedule(p, m, stage) for stage in range(p)]
        return simulate(stages, Costs(times, times, times), num_chunks, file_schedule.placement.style).bubble
    placement = Placement(p, num_chunks, placement_for(schedule))
    stage_costs = [
        sum(chunk_costs[virtual_stage] for virtual_stage in placement.virtual_stages_of(stage)) for stage in range(p)
    ]
    if schedule in V_SCHEDULES:
        step_time = m * max(stage_costs) + _v_idle_time(p, m, schedule) * sum(stage_costs) / p
        return 1 - m * sum(stage_costs) / (p * step_time)
    by_chunk = sum(max(chunk_costs[first : first + p]) for first in range(0, len(chunk_costs), p))
    slowest = (max(stage_costs) + by_chunk) / 2
    divisor = num_chunks * (3 if schedule == "zb-h1" else 1)
    loss_factor = 1.0 if m < p else 1 / 3 if schedule == "zb-h1" else 2 / 3
    missing_time = (num_chunks - 1) * (-m % p) * loss_factor / num_chunks
    if schedule == "zb-h1" and num_chunks == 1:
        missing_time = max(p - m, 0) / 3
    step_time = m * slowest + (sum(stage_costs) - max(stage_costs)) / divisor + missing_time * max(stage_costs)
    return 1 - m * sum(stage_costs) / (p * step_time)


def _v_idle_time(p: int, m: int, schedule: str) -> float:
    """Compute a stage's idle time at F = B = W on even stages, as a fraction of its T."""
    short_time = 2 * max(p - m, 0)
    if schedule == "zb-v":
        return (p - 1 + max(2 * p - 1 - max(m, p), 0) + short_time) / 6
    return (p - (m >= 2 * p) + max(2 * p - max(m, p), 0) * (2 * p - 3) / p + short_time) / 6


def in_flight(
    num_stages: int,
    num_micro_batches: int,
    schedule: str,
    num_chunks: int,
    stage: int,
    placement: str = LOOP,
    group_size: int = 0,
) -> int:
    """Compute the peak number of chunk forwards in flight on ``stage``; for "auto", the maximum over its candidates."""
    if (path := schedule_path(schedule)) is not None:
        return read_schedule(path).peaks[stage]
    p, total = num_stages, num_chunks * num_micro_batches
    peak_1f1b = p - stage if num_chunks == 1 else 2 * (p - stage - 1) + (num_chunks - 1) * (group_size or p) + 1
    peak_v = min(2 * p, stage + 1 + num_micro_batches)
    peaks = {"1f1b": peak_1f1b, "interleaved": peak_1f1b, "gpipe": total, "zb-h1": peak_1f1b + stage}
    peaks |= {"zb-v": peak_v, "dualpipev": min(2 * p + 1, stage + 1 + num_micro_batches)}
    return min(total, max(peaks[name] for name in candidate_schedules(schedule, num_chunks, placement)))


def split_fraction(num_stages: int, num_micro_batches: int, schedule: str, stage: int, num_chunks: int) -> float:
    """Compute the fraction of a stage's backwards that a schedule splits.

    In ``zb-h1`` with chunks, stage 1 splits only the last rounds. For zb-v and dualpipev, the actions are counted.
    """
    if schedule in V_SCHEDULES:
        order = (zero_bubble_v if schedule == "zb-v" else dual_pipe_v)(num_stages, num_micro_batches, stage)
        return sum(isinstance(action, BackwardInput) for action in order) / (2 * num_micro_batches)
    if schedule not in SPLIT_SCHEDULES:
        return 0.0
    if stage == 1 and num_chunks > 1:
        return min(1.0, (num_stages + num_micro_batches % num_stages) / num_micro_batches)
    return 1.0 if stage else 0.0


# Virtual-stage costs, given or measured.


@dataclass(frozen=True)
class Costs:
    """Time per micro-batch and virtual stage, in seconds or any other unit.

    Attributes:
        transfer: time from an action's end until its message arrives.
        backward: full-backward time by virtual stage; empty: the sum of its halves. Splitting costs extra time.

    Raises:
        ValueError: there is not one value per virtual stage, or a value is negative or not finite.
    """

    forward: tuple[float, ...]
    backward_input: tuple[float, ...]
    backward_weight: tuple[float, ...]
    transfer: float = 0.0
    backward: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        lengths = len(self.forward), len(self.backward_input), len(self.backward_weight)
        if lengths[0] == 0 or len(set(lengths)) > 1:
            raise ValueError(
                "costs need a forward, backward_input and backward_weight for each virtual stage, got "
                f"{lengths[0]}, {lengths[1]} and {lengths[2]} values"
            )
        if self.backward and len(self.backward) != lengths[0]:
            raise ValueError(
                f"costs need a backward for each of {lengths[0]} virtual stages, or none, got {len(self.backward)} "
                "values"
            )
        for name in ("forward", "backward_input", "backward_weight", "backward"):
            for virtual_stage, value in enumerate(getattr(self, name)):
                _check_time(f"{name} of virtual stage {virtual_stage}", value)
        _check_time("transfer", self.transfer)

    @classmethod
    def even(cls, num_virtual_stages: int, F: float = 1, B: float = 1, W: float = 1, transfer: float = 0) -> Costs:
        """Create equal costs for all virtual stages.

        The forward costs ``F``, the backward for the input ``B`` and the backward for the weights ``W``.
        """
        return cls((F,) * num_virtual_stages, (B,) * num_virtual_stages, (W,) * num_virtual_stages, transfer)

    @property
    def num_virtual_stages(self) -> int:
        return len(self.forward)

    def time_of(self, action: Action, virtual_stage: int) -> float:
        """Return the time of ``action`` in ``virtual_stage``."""
        if isinstance(action, Forward):
            return self.forward[virtual_stage]
        if isinstance(action, BackwardInput):
            return self.backward_input[virtual_stage]
        if isinstance(action, Backward):
            return self.full_backward[virtual_stage]
        return self.backward_weight[virtual_stage]

    @property
    def full_backward(self) -> tuple[float, ...]:
        """Full-backward time by virtual stage."""
        return self.backward or tuple(map(sum, zip(self.backward_input, self.backward_weight, strict=True)))


def _check_time(name: str, value: float) -> None:
    if not (math.isfinite(value) and value >= 0):
        raise ValueError(f"costs must be finite and not negative, got {value} for {name}")


# Simulation with action times.


@dataclass(frozen=True, slots=True)
class Span:
    """An action's start and end since the step's start, in the costs' unit."""

    action: Action
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Timeline:
    """Each stage's action spans, simulated or measured. A stage idles between its spans."""

    spans: tuple[tuple[Span, ...], ...]

    @property
    def num_stages(self) -> int:
        return len(self.spans)

    @cached_property
    def step_s(self) -> float:
        """Time from the step's start to the last action's end."""
        return max((span.end_s for stage in self.spans for span in stage), default=0.0)

    @cached_property
    def busy_s(self) -> tuple[float, ...]:
        """Total action time by stage."""
        return tuple(sum(span.end_s - span.start_s for span in stage) for stage in self.spans)

    @property
    def idle_s(self) -> tuple[float, ...]:
        """Idle time by stage."""
        return tuple(self.step_s - busy for busy in self.busy_s)

    @property
    def bubble(self) -> float:
        """Idle fraction over all stages."""
        return 1 - sum(self.busy_s) / (self.num_stages * self.step_s) if self.step_s else 0.0


def simulate(stages: Sequence[Sequence[Action]], costs: Costs, num_chunks: int = 1, placement: str = LOOP) -> Timeline:
    """Simulate a schedule. Each action starts as soon as its stage is free and its message has arrived.

    Messages overlap with both stages' work and take ``costs.transfer`` each, or no time within one stage.

    Raises:
        ScheduleError: the schedule cannot run.
        ValueError: ``costs`` does not have ``len(stages) * num_chunks`` virtual stages.
    """
    num_stages, chunk_placement = len(stages), Placement(len(stages), num_chunks, placement)
    if costs.num_virtual_stages != num_stages * num_chunks:
        raise ValueError(
            f"costs must be given for each virtual stage, {num_stages} stages x {num_chunks} chunks = "
            f"{num_stages * num_chunks}, got {costs.num_virtual_stages}"
        )
    spans: list[list[Span]] = [[] for _ in stages]
    free_at = [0.0] * num_stages
    arrives_at: dict[tuple[Channel, Content], float] = {}
    for event in run(stages, num_chunks, placement=placement):
        start = free_at[event.stage]
        if event.source is not None and event.received_content is not None:
            start = max(start, arrives_at.pop((event.source, event.received_content)))
        end = start + costs.time_of(event.action, chunk_placement.virtual_stage(event.stage, event.action.chunk))
        if event.target is not None and event.sent_content is not None:
            is_local = event.target.receiver == event.stage
            arrives_at[event.target, event.sent_content] = end + (0.0 if is_local else costs.transfer)
        free_at[event.stage] = end
        spans[event.stage].append(Span(event.action, start, end))
    return Timeline(tuple(map(tuple, spans)))


# Schedule choice by simulated step time.

STEP_TIME_TOLERANCE = 1e-6
"""Step times that differ by a smaller relative amount count as equal."""


@dataclass(frozen=True)
class Choice:
    """The chosen schedule and the reason.

    Attributes:
        timelines: each candidate's simulated timeline.
        peaks: maximum forwards in flight on one stage, for each candidate.
        reason: explanation for the log.
    """

    name: str
    timelines: Mapping[str, Timeline]
    peaks: Mapping[str, int]
    reason: str


def choose(
    candidates: Mapping[str, Order],
    costs: Costs,
    num_stages: int,
    num_micro_batches: int,
    num_chunks: int = 1,
    placement: str = LOOP,
) -> Choice:
    """Choose the candidate with the shortest simulated step; among equals, the fewest forwards in flight decide.

    Raises:
        ScheduleError: a candidate cannot run; the message names it.
        ValueError: there are no candidates, or ``costs`` has another number of virtual stages.
    """
    if not candidates:
        raise ValueError("choose needs at least one schedule, got none")
    timelines: dict[str, Timeline] = {}
    peaks: dict[str, int] = {}
    for name, order in candidates.items():
        try:
            stages = [order(num_stages, num_micro_batches, stage) for stage in range(num_stages)]
            peaks[name] = max(validate(stages, num_micro_batches, num_chunks=num_chunks, placement=placement))
        except ScheduleError as error:
            raise ScheduleError(f"the schedule {name} cannot run: {error}") from error
        timelines[name] = simulate(stages, costs, num_chunks, placement)
    best = min(timeline.step_s for timeline in timelines.values())
    fastest = [name for name in timelines if timelines[name].step_s <= best * (1 + STEP_TIME_TOLERANCE)]
    chosen = min(fastest, key=lambda name: peaks[name])
    return Choice(chosen, timelines, peaks, _reason(chosen, fastest, timelines, peaks))


def _reason(chosen: str, fastest: list[str], timelines: Mapping[str, Timeline], peaks: Mapping[str, int]) -> str:
    """Format the predicted step times, the choice first, and the tie-breaker if needed."""
    longest = max(timeline.step_s for timeline in timelines.values())
    unit, factor = ("s", 1.0) if longest >= 1 else ("ms", 1e3)
    times = {name: f"{timeline.step_s * factor:.3g}" for name, timeline in timelines.items()}
    reason = f"{chosen}: predicted {times[chosen]} {unit} per step"
    others = sorted((name for name in timelines if name != chosen), key=lambda name: timelines[name].step_s)
    if others:
        reason += " against " + ", ".join(f"{times[name]} ({name})" for name in others)
    tied = [name for name in fastest if name != chosen]
    if tied:
        tied_peaks = ", ".join(f"{peaks[name]} ({name})" for name in tied)
        reason += f"; it has {peaks[chosen]} micro-batches in flight, against {tied_peaks}"
    return reason
