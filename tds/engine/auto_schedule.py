"""``"schedule": "auto"``: measure, then choose among the schedules that fit the layers as they lie.

Two steps of 1f1b and two of zb-h1 are run, the second of each measured: F and the whole backward in the one, the two
halves of it in the other. Then the costs of all ranks are averaged, each schedule is simulated with the costs that it
has, and all ranks go on with the fastest; the same costs choose again when the number of micro-batches changes.
Schedules give the same bits, so this changes nothing but the time. No layer is moved. With several chunks on each stage
interleaved takes the place of 1f1b; in a V dualpipev does, whose middle has whole backwards, and zb-v that of zb-h1.

``"auto:1f1b,gpipe"`` chooses among these alone, as where others would not fit into memory, and tries no other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from tds.action_times import Work, costs_of, durations_of, medians
from tds.log import log_rank_0
from tds.p2p.collective_scope import collective_scope
from tds.schedule import Costs, Placement, V, choose, schedule_named
from tds.schedule.simulate import AUTO, SCHEDULES, SPLITTING, candidates, is_auto

STEPS_OF_TRIAL = 2
"""Of each schedule that is tried; the last of them is measured."""
MARGIN = 0.01
"""A schedule that splits the backward must be faster than one that does not by this share: it holds more at once."""


def asked_for(schedule: Any) -> str | None:
    """Return "auto" or "auto:NAME,..." where ``schedule``, of the JSON, is one of these, else None."""
    return schedule.lower() if isinstance(schedule, str) and is_auto(schedule.lower()) else None


def choices(schedule: str, placement: Placement) -> tuple[str, ...]:
    """Return the schedules among which ``schedule``, "auto" or "auto:NAME,...", chooses for chunks that lie so.

    Raises:
        ValueError: a name that is no schedule, or none that goes with the chunks as they lie.
    """
    asked = [name for name in schedule.partition(":")[2].split(",") if name]
    names = candidates(schedule, placement.num_chunks, placement.kind)
    unknown = [name for name in asked if name not in SCHEDULES or name == AUTO]
    if unknown or not names:
        possible = candidates(AUTO, placement.num_chunks, placement.kind)
        raise ValueError(
            f'"auto" can choose among {", ".join(possible)} for chunks that lie as these, got '
            f'"pipeline": {{"schedule": "{schedule}"}}. Name some of them, or none for all'
        )
    return names


def trials(names: Sequence[str], placement: Placement) -> tuple[str, ...]:
    """Return the schedules of the first steps: two of one with whole backwards, two of one that splits them.

    Args:
        names: as ``choices`` returns them; of a single one there is nothing to try.
    """
    if placement.num_stages == 1 or len(names) == 1:
        return (names[0],)
    ends = (names[-1], names[0]) if placement.kind == V else (names[0], names[-1])
    return tuple(name for name in ends for _ in range(STEPS_OF_TRIAL))


class Auto:
    """Decides on the schedule of one engine, the same on every rank.

    Args:
        set_schedule: called with the name of the schedule of the steps to come; ``Plan.set``, as a schedule that a
            program sets by ``engine.set_schedule`` calls ``keep_schedule``.
        names: those among which it chooses, as of ``choices``.
        group: all ranks.
    """

    def __init__(
        self,
        set_schedule: Callable[[str], None],
        names: Sequence[str],
        *,
        placement: Placement,
        stage: int,
        group: Any,
        device: torch.device,
    ) -> None:
        self._set_schedule, self._names = set_schedule, names
        self._trials = trials(names, placement)
        self._placement, self._stage = placement, stage
        self._group, self._device = group, device
        self._step = 0
        self._measured: list[Costs] = []
        self._chosen_for: int | None = None
        self.choice: str | None = None
        self.is_chosen = len(self._trials) == 1
        self._set_schedule(self._trials[0])
        if self.is_chosen:
            why = "with one stage" if placement.num_stages == 1 else "of one schedule"
            self._log(f"{self._trials[0]}: {why} there is nothing to choose")

    @property
    def measures(self) -> bool:
        """True if ``observe`` needs the times of the step that comes."""
        return not self.is_chosen and self._step % STEPS_OF_TRIAL == STEPS_OF_TRIAL - 1

    def keep_schedule(self) -> None:
        """Leave the schedule as it is from now on: the program has set one."""
        self.is_chosen, self._chosen_for = True, None

    def before_step(self, num_micro_batches: int) -> None:
        """Set the schedule of the step that comes; choose again if its number of micro-batches is another."""
        if not self.is_chosen:
            self._set_schedule(self._trials[self._step])
        elif self._chosen_for not in (None, num_micro_batches):
            self._choose(num_micro_batches)

    def observe(self, work: Iterable[Work] | None, num_micro_batches: int) -> None:
        """Take the times of a step that ended; after the last trial, choose. Collective over all ranks."""
        if self.is_chosen:
            return
        if work is not None and self.measures:
            self._measured.append(self._average(work))
        self._step += 1
        if self._step == len(self._trials):
            self.is_chosen = True
            self._choose(num_micro_batches)

    def _choose(self, num_micro_batches: int) -> None:
        """Go on with the fastest schedule for this many micro-batches. All ranks have the same costs."""
        whole, split = self._measured
        name, reason = best(whole, split, self._placement, num_micro_batches, self._names)
        self._chosen_for = num_micro_batches
        self._set_schedule(name)
        self._log(reason)

    def _average(self, work: Iterable[Work]) -> Costs:
        """Return the costs of every piece, the mean over the ranks that hold it. Collective."""
        own: list[dict[Any, float]] = [{} for _ in range(self._placement.num_stages)]
        own[self._stage] = medians(durations_of(work))
        costs = costs_of(own, self._placement.num_chunks, self._placement.kind)
        rows = [*map(list, (costs.forward, costs.backward_input, costs.backward_weight, costs.backward))]
        total = torch.tensor(rows, dtype=torch.float32, device=self._device)
        with collective_scope(self._stage, "averaging the times of its actions"):
            dist.all_reduce(total, group=self._group)
        forward, *backwards = (total * self._placement.num_stages / dist.get_world_size(self._group)).tolist()
        return Costs(tuple(forward), tuple(backwards[0]), tuple(backwards[1]), backward=tuple(backwards[2]))

    def _log(self, reason: str) -> None:
        self.choice = f'"schedule": "auto" runs {reason}'
        if dist.get_rank() == 0:
            log_rank_0(self.choice)


def best(
    whole: Costs, split: Costs, placement: Placement, num_micro_batches: int, names: Sequence[str] = ()
) -> tuple[str, str]:
    """Return (the schedule to run, why), from the costs measured with a whole and with a split backward.

    Args:
        names: among which to choose; none: all for chunks that lie so.
    """
    lie = placement.num_chunks, placement.kind
    sizes = placement.num_stages, num_micro_batches, *lie
    priced = replace(split, backward=whole.whole_backward)  # of the trial's few micro-batches none may have been whole
    names = names or candidates(AUTO, *lie)
    plain = {name: schedule_named(name, *lie) for name in names if name not in SPLITTING or placement.kind == V}
    halves = {name: schedule_named(name, *lie) for name in names if name not in plain}
    chosen = choose(plain, priced if placement.kind == V else whole, *sizes)
    timelines = dict(chosen.timelines)
    if halves:
        timelines |= choose(halves, priced, *sizes).timelines
    times = {name: timeline.step_s for name, timeline in timelines.items()}
    name = next((each for each in halves if times[each] < times[chosen.name] * (1 - MARGIN)), chosen.name)
    listed = ", ".join(f"{each} {seconds * 1e3:.1f}" for each, seconds in sorted(times.items(), key=lambda t: t[1]))
    pieces = zip(whole.forward, whole.backward_input, split.backward_input, split.backward_weight, strict=True)
    measured = "; ".join(
        f"{_piece_name(i, placement)}: " + " ".join(f"{1e3 * t:.1f}" for t in each) for i, each in enumerate(pieces)
    )
    bubble = 100 * timelines[name].bubble
    return name, (
        f"{name} for {num_micro_batches} micro-batches, with a bubble of {bubble:.1f} %: a step takes by simulation, "
        f"in ms, {listed}; "
        f"measured per micro-batch, in ms, forward, backward, its two halves: {measured}"
    )


def _piece_name(piece: int, placement: Placement) -> str:
    stage = f"stage {placement.stage_of(piece)}"
    return stage if placement.num_chunks == 1 else f"{stage} chunk {piece // placement.num_stages}"
