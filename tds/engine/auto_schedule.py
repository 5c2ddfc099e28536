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
from tds.schedule.simulate import AUTO, SCHEDULES, SPLIT_SCHEDULES, candidate_schedules, is_auto

STEPS_PER_TRIAL = 2
"""Number of steps per trial; the last one is measured."""
MARGIN = 0.01
"""Fraction by which a schedule with split backwards must be faster than one without, because it needs more memory."""


def parse_auto(schedule: Any) -> str | None:
    """Return the JSON's ``schedule`` in lower case if it is "auto" or "auto:NAME,...", otherwise None."""
    return schedule.lower() if isinstance(schedule, str) and is_auto(schedule.lower()) else None


def allowed_schedules(schedule: str, placement: Placement) -> tuple[str, ...]:
    """List the schedules that "auto" or "auto:NAME,..." chooses among for ``placement``.

    Raises:
        ValueError: a name is not a schedule, or none of the schedules fits the placement.
    """
    requested = [name for name in schedule.partition(":")[2].split(",") if name]
    names = candidate_schedules(schedule, placement.num_chunks, placement.style)
    unknown = [name for name in requested if name not in SCHEDULES or name == AUTO]
    if unknown or not names:
        possible = candidate_schedules(AUTO, placement.num_chunks, placement.style)
        raise ValueError(
            f'"auto" can choose among {", ".join(possible)} for {placement.num_chunks} chunks per stage and the '
            "placement "
            f'"{placement.style}", got "pipeline": {{"schedule": "{schedule}"}}. List some of these schedules, or none '
            "for all"
        )
    return names


def trial_schedules(names: Sequence[str], placement: Placement) -> tuple[str, ...]:
    """List the schedule of each trial step: two steps with full backwards, then two with split backwards.

    Args:
        names: the result of ``allowed_schedules``. A single name needs no trial; the result is that name.
    """
    if placement.num_stages == 1 or len(names) == 1:
        return (names[0],)
    trial_names = (names[-1], names[0]) if placement.style == V else (names[0], names[-1])
    return tuple(name for name in trial_names for _ in range(STEPS_PER_TRIAL))


class AutoSchedule:
    """Chooses the schedule of one engine; the choice is the same on every rank.

    Args:
        set_schedule: called with the name of the schedule for the next steps. It must be
            ``SchedulePlan.set_schedule``, not ``engine.set_schedule``, which calls ``keep_schedule``.
        names: the schedules to choose among, see ``allowed_schedules``.
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
        self._trials = trial_schedules(names, placement)
        self._placement, self._stage = placement, stage
        self._group, self._device = group, device
        self._step = 0
        self._measured: list[Costs] = []
        self._chosen_num_micro_batches: int | None = None
        self.choice: str | None = None
        self.is_chosen = len(self._trials) == 1
        self._set_schedule(self._trials[0])
        if self.is_chosen:
            explanation = "one stage" if placement.num_stages == 1 else "one schedule"
            self._log(f"{self._trials[0]}: with {explanation} there is no choice")

    @property
    def should_measure(self) -> bool:
        """True if ``observe`` needs the times of the next step."""
        return not self.is_chosen and self._step % STEPS_PER_TRIAL == STEPS_PER_TRIAL - 1

    def keep_schedule(self) -> None:
        """Stop changing the schedule, because the program has set one."""
        self.is_chosen, self._chosen_num_micro_batches = True, None

    def before_step(self, num_micro_batches: int) -> None:
        """Set the schedule of the next step; choose again if its number of micro-batches has changed."""
        if not self.is_chosen:
            self._set_schedule(self._trials[self._step])
        elif self._chosen_num_micro_batches not in (None, num_micro_batches):
            self._choose(num_micro_batches)

    def observe(self, work: Iterable[Work] | None, num_micro_batches: int) -> None:
        """Record the times of a completed step, and choose after the last trial. Collective over all ranks."""
        if self.is_chosen:
            return
        if work is not None and self.should_measure:
            self._measured.append(self._average(work))
        self._step += 1
        if self._step == len(self._trials):
            self.is_chosen = True
            self._choose(num_micro_batches)

    def _choose(self, num_micro_batches: int) -> None:
        """Set the fastest schedule for ``num_micro_batches``; it is equal on all ranks, because the costs are equal."""
        full_costs, split_costs = self._measured
        name, reason = fastest_schedule(full_costs, split_costs, self._placement, num_micro_batches, self._names)
        self._chosen_num_micro_batches = num_micro_batches
        self._set_schedule(name)
        self._log(reason)

    def _average(self, work: Iterable[Work]) -> Costs:
        """Average the costs of every virtual stage over the ranks that hold it. Collective."""
        stage_medians: list[dict[Any, float]] = [{} for _ in range(self._placement.num_stages)]
        stage_medians[self._stage] = medians(durations_of(work))
        costs = costs_of(stage_medians, self._placement.num_chunks, self._placement.style)
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


def fastest_schedule(
    full_costs: Costs, split_costs: Costs, placement: Placement, num_micro_batches: int, names: Sequence[str] = ()
) -> tuple[str, str]:
    """Choose the fastest schedule; return (its name, explanation for the log).

    Args:
        full_costs: costs measured with full backwards.
        split_costs: costs measured with split backwards.
        names: the schedules to choose among; empty: all that fit ``placement``.
    """
    placement_args = placement.num_chunks, placement.style
    choose_args = placement.num_stages, num_micro_batches, *placement_args
    # With few micro-batches the split trial may not have run any full backward.
    combined_costs = replace(split_costs, backward=full_costs.full_backward)
    names = names or candidate_schedules(AUTO, *placement_args)
    full_orders = {
        name: schedule_named(name, *placement_args)
        for name in names
        if name not in SPLIT_SCHEDULES or placement.style == V
    }
    split_orders = {name: schedule_named(name, *placement_args) for name in names if name not in full_orders}
    chosen = choose(full_orders, combined_costs if placement.style == V else full_costs, *choose_args)
    timelines = dict(chosen.timelines)
    if split_orders:
        timelines |= choose(split_orders, combined_costs, *choose_args).timelines
    times = {name: timeline.step_s for name, timeline in timelines.items()}
    name = next((entry for entry in split_orders if times[entry] < times[chosen.name] * (1 - MARGIN)), chosen.name)
    listed = ", ".join(f"{entry} {seconds * 1e3:.1f}" for entry, seconds in sorted(times.items(), key=lambda t: t[1]))
    cost_rows = zip(
        full_costs.forward,
        full_costs.backward_input,
        split_costs.backward_input,
        split_costs.backward_weight,
        strict=True,
    )
    measured = "; ".join(
        f"{_format_virtual_stage(i, placement)}: " + " ".join(f"{1e3 * t:.1f}" for t in entry)
        for i, entry in enumerate(cost_rows)
    )
    bubble = 100 * timelines[name].bubble
    return name, (
        f"{name} for {num_micro_batches} micro-batches, with a bubble of {bubble:.1f} %; simulated step times "
        f"in ms: {listed}; "
        f"measured times per micro-batch in ms (forward, backward, its two halves): {measured}"
    )


def _format_virtual_stage(virtual_stage: int, placement: Placement) -> str:
    stage = f"stage {placement.stage_of(virtual_stage)}"
    return stage if placement.num_chunks == 1 else f"{stage} chunk {virtual_stage // placement.num_stages}"
