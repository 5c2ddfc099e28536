"""``"schedule": "auto"``: measure action times, then choose among the schedules that fit the placement of the layers.

The first four steps are trials: two with 1f1b and two with zb-h1. The second step of each is measured. The 1f1b trial
yields the times of the forward and the full backward, the zb-h1 trial the times of the two halves of the backward. The
costs are averaged over all ranks, each schedule is simulated with the costs for its type of backward (full or split),
and all ranks continue with the fastest schedule. If the number of micro-batches changes, the same costs are simulated
again. All schedules give bitwise equal results, so the choice only affects the time. No layer is moved.

With several chunks per stage, interleaved replaces 1f1b in the trials. With the placement "v", dualpipev, which has
full backwards in its middle, replaces 1f1b, and zb-v replaces zb-h1.

``"auto:1f1b,gpipe"`` restricts trials and choice to the named schedules, for example because others need too much
memory.
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
"""Number of steps per trial; the last one is measured."""
MARGIN = 0.01
"""Fraction by which a schedule with split backwards must be faster than one without, because it needs more memory."""


def asked_for(schedule: Any) -> str | None:
    """Return the JSON's ``schedule`` in lower case if it is "auto" or "auto:NAME,...", otherwise None."""
    return schedule.lower() if isinstance(schedule, str) and is_auto(schedule.lower()) else None


def choices(schedule: str, placement: Placement) -> tuple[str, ...]:
    """Return the names of the schedules that "auto" or "auto:NAME,..." chooses among for ``placement``.

    Raises:
        ValueError: a name is not a schedule, or none of the schedules fits the placement.
    """
    requested = [name for name in schedule.partition(":")[2].split(",") if name]
    names = candidates(schedule, placement.num_chunks, placement.kind)
    unknown = [name for name in requested if name not in SCHEDULES or name == AUTO]
    if unknown or not names:
        possible = candidates(AUTO, placement.num_chunks, placement.kind)
        raise ValueError(
            f'"auto" can choose among {", ".join(possible)} for {placement.num_chunks} chunks per stage and the '
            "placement "
            f'"{placement.kind}", got "pipeline": {{"schedule": "{schedule}"}}. List some of these schedules, or none '
            "for all"
        )
    return names


def trials(names: Sequence[str], placement: Placement) -> tuple[str, ...]:
    """Return the schedule of each trial step: two steps with full backwards, then two with split backwards.

    Args:
        names: the result of ``choices``. A single name needs no trial; the result is that name.
    """
    if placement.num_stages == 1 or len(names) == 1:
        return (names[0],)
    tried = (names[-1], names[0]) if placement.kind == V else (names[0], names[-1])
    return tuple(name for name in tried for _ in range(STEPS_OF_TRIAL))


class Auto:
    """Chooses the schedule of one engine; the choice is the same on every rank.

    Args:
        set_schedule: called with the name of the schedule for the next steps. It must be ``SchedulePlan.set``, not
            ``engine.set_schedule``, which calls ``keep_schedule``.
        names: the schedules to choose among, see ``choices``.
        group: process group of all ranks.
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
            why = "one stage" if placement.num_stages == 1 else "one schedule"
            self._log(f"{self._trials[0]}: with {why} there is no choice")

    @property
    def measures(self) -> bool:
        """True if ``observe`` needs the times of the next step."""
        return not self.is_chosen and self._step % STEPS_OF_TRIAL == STEPS_OF_TRIAL - 1

    def keep_schedule(self) -> None:
        """Stop changing the schedule, because the program has set one."""
        self.is_chosen, self._chosen_for = True, None

    def before_step(self, num_micro_batches: int) -> None:
        """Set the schedule of the next step; choose again if its number of micro-batches has changed."""
        if not self.is_chosen:
            self._set_schedule(self._trials[self._step])
        elif self._chosen_for not in (None, num_micro_batches):
            self._choose(num_micro_batches)

    def observe(self, work: Iterable[Work] | None, num_micro_batches: int) -> None:
        """Record the times of a completed step, and choose after the last trial. Collective over all ranks."""
        if self.is_chosen:
            return
        if work is not None and self.measures:
            self._measured.append(self._average(work))
        self._step += 1
        if self._step == len(self._trials):
            self.is_chosen = True
            self._choose(num_micro_batches)

    def _choose(self, num_micro_batches: int) -> None:
        """Set the fastest schedule for ``num_micro_batches``; it is equal on all ranks, because the costs are equal."""
        whole_costs, split_costs = self._measured
        name, reason = best(whole_costs, split_costs, self._placement, num_micro_batches, self._names)
        self._chosen_for = num_micro_batches
        self._set_schedule(name)
        self._log(reason)

    def _average(self, work: Iterable[Work]) -> Costs:
        """Return the costs of every piece, averaged over the ranks that hold it. Collective."""
        by_stage: list[dict[Any, float]] = [{} for _ in range(self._placement.num_stages)]
        by_stage[self._stage] = medians(durations_of(work))
        costs = costs_of(by_stage, self._placement.num_chunks, self._placement.kind)
        rows = [*map(list, (costs.forward, costs.backward_input, costs.backward_weight, costs.backward))]
        total = torch.tensor(rows, dtype=torch.float32, device=self._device)
        with collective_scope(self._stage, "averaging the action times"):
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
    """Return (name of the fastest schedule, explanation for the log).

    Args:
        whole: costs measured with full backwards.
        split: costs measured with split backwards.
        names: the schedules to choose among; empty: all that fit ``placement``.
    """
    placement_args = placement.num_chunks, placement.kind
    sizes = placement.num_stages, num_micro_batches, *placement_args
    # With few micro-batches the split trial may not have run any full backward.
    combined_costs = replace(split, backward=whole.whole_backward)
    names = names or candidates(AUTO, *placement_args)
    whole_orders = {
        name: schedule_named(name, *placement_args) for name in names if name not in SPLITTING or placement.kind == V
    }
    split_orders = {name: schedule_named(name, *placement_args) for name in names if name not in whole_orders}
    chosen = choose(whole_orders, combined_costs if placement.kind == V else whole, *sizes)
    timelines = dict(chosen.timelines)
    if split_orders:
        timelines |= choose(split_orders, combined_costs, *sizes).timelines
    times = {name: timeline.step_s for name, timeline in timelines.items()}
    name = next((entry for entry in split_orders if times[entry] < times[chosen.name] * (1 - MARGIN)), chosen.name)
    listed = ", ".join(f"{entry} {seconds * 1e3:.1f}" for entry, seconds in sorted(times.items(), key=lambda t: t[1]))
    pieces = zip(whole.forward, whole.backward_input, split.backward_input, split.backward_weight, strict=True)
    measured = "; ".join(
        f"{_piece_name(i, placement)}: " + " ".join(f"{1e3 * t:.1f}" for t in entry) for i, entry in enumerate(pieces)
    )
    bubble = 100 * timelines[name].bubble
    return name, (
        f"{name} for {num_micro_batches} micro-batches, with a bubble of {bubble:.1f} %; simulated step times "
        f"in ms: {listed}; "
        f"measured times per micro-batch in ms (forward, backward, its two halves): {measured}"
    )


def _piece_name(piece: int, placement: Placement) -> str:
    stage = f"stage {placement.stage_of(piece)}"
    return stage if placement.num_chunks == 1 else f"{stage} chunk {piece // placement.num_stages}"
