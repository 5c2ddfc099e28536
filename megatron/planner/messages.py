"""What ranks of a layout send each other in a step, and what follows it: sums of units, boundaries, gradients, update.

``megatron.planner.traffic`` has the table of messages. On a CPU whatever is sent takes the time of the cores that
compute, so that nothing hides it.
"""

from __future__ import annotations

from collections.abc import Sequence

from megatron.cost.costs import Costs
from megatron.cost.memory import BYTES, State
from megatron.cost.work import Work
from megatron.planner.layout import SPLITTING, Layout
from megatron.planner.machine import Machine
from megatron.planner.traffic import Group, Traffic
from megatron.planner.work import Seconds


class Messages:
    """Tells what layouts of one model send on ``machine``."""

    def __init__(self, costs: Costs, machine: Machine) -> None:
        self.costs, self.machine = costs, machine

    def sums(self, layout: Layout, units: Sequence[Seconds]) -> list[Traffic]:
        """Return the messages between tensor ranks of each unit for a micro-batch."""
        return [forward + backward for forward, backward in self.ways(layout, units)]

    def ways(self, layout: Layout, units: Sequence[Seconds]) -> list[tuple[Traffic, Traffic]]:
        """Return the messages between tensor ranks of each unit's forward and of its backward."""
        group = Group.of(self.machine, layout.tensor, 1, layout.world_size)
        works = self.costs.unit_work(layout.micro_batch_size, layout.tensor, BYTES[layout.dtype])
        again = 2 if layout.recompute == "full" else 1
        found = []
        known: dict[int, tuple[Traffic, Traffic]] = {}
        for work, unit in zip(works, units, strict=True):
            if id(work) not in known:
                is_cut, times = layout.sequence_parallel and bool(work.core), again if work.core else 1
                kinds = (group.gathered, group.scattered) if is_cut else (group.summed,)
                forward = sum((one(size).times(times) for size in work.sums for one in kinds), Traffic())
                known[id(work)] = forward, self._back(group, work, unit, layout, is_cut)
            found.append(known[id(work)])
        return found

    def across(self, layout: Layout, bounds: Sequence[int], piece_s: float) -> tuple[Traffic, float]:
        """Return the messages of the busiest boundary of stages in a step, and the seconds that stages wait for them.

        The first micro-batch waits at each boundary, there and back; others while their message takes longer than a
        piece.
        """
        if layout.pipe == 1:
            return Traffic(), 0.0
        width = BYTES[layout.dtype]
        stride = layout.data * layout.tensor
        group = Group.of(self.machine, layout.pipe, stride, layout.world_size)
        sizes = [
            self.costs.boundary_bytes(bound, layout.micro_batch_size, width) / layout.sequence for bound in bounds[1:-1]
        ]
        m, p, c = layout.num_micro_batches, layout.pipe, layout.chunks
        one = group.sent(max(sizes))
        number = 2 * m * (c if c == 1 else (c * p - 1) / p)
        slow = max(one.seconds - piece_s / 2, 0.0)
        waits = 2 * (p - 1) * one.seconds + 2 * m * c * slow
        whole = one.times(number)
        return whole.behind(whole.seconds - waits), waits

    def summed(self, layout: Layout, bounds: Sequence[int], backward_s: float) -> tuple[Traffic, float]:
        """Return what replicas send in a step, and the seconds of the update."""
        machine, state = self.machine, State.of(layout.dtype, layout.optimizer)
        held = max(self.costs.stage_parameters(bounds, layout.tensor, layout.pipe))
        group = Group.of(machine, layout.data, layout.tensor, layout.world_size)
        m, stage = layout.num_micro_batches, layout.zero_stage
        hiding = 0.0 if machine.is_cpu else backward_s
        gradients, weights = held * state.gradient, held * state.width
        if stage < 2:
            sent = group.summed(gradients).behind(hiding if layout.overlaps_sums else 0.0)
        else:
            sent = group.scattered(gradients).behind(hiding).times(m)
        if stage == 3:
            sent += group.gathered(weights).times(2 * m)
        elif stage:
            sent += group.gathered(weights)
        return sent, self._update(layout, held, state)

    def _update(self, layout: Layout, held: int, state: State) -> float:
        """Return the seconds of an update: all of a parameter is read and written, and gradients read for the norm."""
        machine, share = self.machine, layout.zero.share(1)
        number = held / share
        moved = number * (2 * (state.width + state.optimizer) + 2 * state.gradient)
        if not layout.offload_optimizer:
            return moved / machine.update_bandwidth
        copies = number * 2 * state.gradient / machine.host_bandwidth  # masters come back as they are, and are rounded
        return moved / machine.host_update_bandwidth + copies

    def _back(self, group: Group, work: Work, unit: Seconds, layout: Layout, is_cut: bool) -> Traffic:
        """Return the messages of a unit's backward; ``is_cut``: what lies between its products is cut over the ranks.

        Sums run beside the column layers' products for weights; what is joined once more runs beside their products for
        the input. Where a schedule puts products for weights off, or layers are compiled, one follows the other, and
        what was joined in forward is kept.
        """
        is_plain = layout.schedule == SPLITTING or layout.is_compiled
        hides = layout.overlaps_tensor and not self.machine.is_cpu and not is_plain
        beside = unit.columns if hides else 0.0
        if not is_cut:
            return sum((group.summed(size) for size in work.back), Traffic()).behind(beside)
        cut, whole = work.back[: len(work.sums)], work.back[len(work.sums) :]
        once = sum((group.gathered(size) for size in cut), Traffic())
        sums = sum((group.scattered(size) for size in cut), Traffic())
        sums += sum((group.summed(size) for size in whole), Traffic())
        again = Traffic() if is_plain else once.behind(beside)
        return once + again + sums.behind(beside)


def total(sent: Sequence[Traffic], pieces: Sequence[tuple[int, int]]) -> Traffic:
    return sum((sent[n] for start, stop in pieces for n in range(start, stop)), Traffic())
