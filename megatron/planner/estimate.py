"""Memory, step time and rates of one layout.

A step of m micro-batches on p stages lasts ``m x mean(T) / (1 - bubble)``, T being a stage's time for a micro-batch
with its sums over tensor ranks and ``bubble`` that of ``megatron.stages``; then messages between stages that nothing
hides, sums over replicas beyond the last backward, and the update.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron import cost
from megatron.cost.costs import Costs
from megatron.cost.memory import BYTES, State
from megatron.cost.work import Work
from megatron.planner.layout import Layout
from megatron.planner.machine import Machine
from megatron.planner.traffic import Group, Traffic
from megatron.planner.work import Clock, Seconds
from megatron.stages import bubble, pieces_on

SPLITTING = "zb-h1"
"""The schedule that puts the gradients of weights off."""
TENSOR, PIPELINE, DATA = "tensor", "pipeline", "data"


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """What a layout will take.

    Args:
        layout: whose it is.
        bounds: of the pieces, in units of the model's costs.
        memory: of one rank of each stage.
        parts: seconds of a step by what they are spent on; their sum is ``step_s``.
        bubble: share of a step in which a stage waits for others, on average.
        traffic: kind of communication -> bytes, seconds and hidden seconds of the busiest rank.
        flops: of the whole model for a step, without recomputation; where attention is causal, that half of it.
        peak_flops: of all devices.
        tokens: of a step.
    """

    layout: Layout
    bounds: Sequence[int]
    memory: Sequence[cost.Memory]
    parts: Mapping[str, float]
    bubble: float
    traffic: Mapping[str, Traffic]
    flops: float
    peak_flops: float
    tokens: int

    @property
    def step_s(self) -> float:
        return sum(self.parts.values())

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.step_s

    @property
    def mfu(self) -> float:
        return self.flops / self.step_s / self.peak_flops

    @property
    def most_bytes(self) -> int:
        """Bytes of the fullest device."""
        return max(stage.total for stage in self.memory)

    def days(self, tokens: float) -> float:
        """Return how long so many tokens take."""
        return tokens / self.tokens_per_s / 86400


class Planner:
    """Estimates layouts of one model on one machine; what layouts share is reckoned once.

    Args:
        config: a ``megatron.config.Config``; its model, lengths and family are read.
    """

    def __init__(self, config: Any, machine: Machine, costs: Costs | None = None) -> None:
        self.config, self.machine = config, machine
        self.costs = costs or cost.of(config, is_on_cpu=machine.is_cpu)
        self.num_estimates = 0
        self._clock = Clock(self.costs, machine)
        self._bounds: dict[tuple[int, int], list[int]] = {}
        self._parameters: dict[int, int] = {}
        self._units: dict[tuple[Any, ...], list[Seconds]] = {}

    def estimate(self, layout: Layout) -> Estimate:
        """Return what ``layout`` will take.

        Raises:
            ValueError: there are fewer layers than pieces.
            ConfigError: the machine does not know the number format.
        """
        self.num_estimates += 1
        bounds = self.bounds(layout)
        parts, idle, traffic = self._times(layout, bounds)
        world = layout.world_size
        peak = self.machine.peak_flops.get(layout.dtype) or self.machine.product_rate(layout.dtype, 1e9)
        return Estimate(
            layout=layout,
            bounds=bounds,
            memory=self.memory(layout),
            parts=parts,
            bubble=idle,
            traffic=traffic,
            flops=self.costs.flops_per_step(layout.global_batch_size),
            peak_flops=world * peak,
            tokens=layout.global_batch_size * self.config.tokens_per_sample,
        )

    def bounds(self, layout: Layout) -> list[int]:
        """Return the bounds of the pieces, in units."""
        key = layout.pipe, layout.chunks
        if key not in self._bounds:
            self._bounds[key] = self.costs.stage_bounds(*key)
        return self._bounds[key]

    def can_cut(self, layout: Layout) -> bool:
        """Return whether each piece gets a layer: a T5 may be cut at a stage that is said."""
        try:
            return bool(self.bounds(layout))
        except ValueError:
            return False

    def parameters(self, tensor: int) -> int:
        """Return the parameters of the whole model that one of ``tensor`` ranks would hold."""
        if tensor not in self._parameters:
            self._parameters[tensor] = self.costs.stage_parameters([0, self.costs.num_units], tensor)[0]
        return self._parameters[tensor]

    def memory(self, layout: Layout) -> list[cost.Memory]:
        """Return what one rank of each stage holds."""
        return self.costs.memory_per_stage(
            self.bounds(layout),
            micro_batch_size=layout.micro_batch_size,
            num_micro_batches=layout.num_micro_batches,
            tensor=layout.tensor,
            dtype=layout.dtype,
            optimizer=layout.optimizer,
            zero=layout.zero,
            checkpoint_activations=layout.recompute == "full",
            is_selective=layout.recompute == "selective",
            sequence=layout.sequence,
            waiting=layout.waiting,
            schedule=layout.schedule,
            chunks=layout.chunks,
        )

    def units(self, layout: Layout) -> list[Seconds]:
        """Return the seconds of each unit for a micro-batch, without messages."""
        key = layout.micro_batch_size, layout.tensor, layout.dtype, layout.sequence_parallel, layout.recompute
        if key not in self._units:
            self._units[key] = self._clock.units(layout)
        return self._units[key]

    def _times(self, layout: Layout, bounds: Sequence[int]) -> tuple[dict[str, float], float, dict[str, Traffic]]:
        m, p = layout.num_micro_batches, layout.pipe
        units = self.units(layout)
        sums = self._sums(layout, units)
        seconds = [own.whole + sent.exposed_s for own, sent in zip(units, sums, strict=True)]
        pieces = [sum(seconds[start:stop]) for start, stop in zip(bounds, bounds[1:], strict=False)]
        idle = bubble(p, m, layout.schedule, layout.chunks, pieces)
        running = m * sum(pieces) / (p * (1 - idle))
        stages = [pieces_on(bounds, p, stage) for stage in range(p)]
        tensor = max((_total(sums, own) for own in stages), key=lambda sent: sent.seconds).times(m)
        last_backward = min(sum(units[n].backward for a, b in own for n in range(a, b)) for own in stages)
        across, waits = self._across(layout, bounds, min(pieces))
        data, after = self._summed(layout, bounds, last_backward)
        again = m * sum(unit.again for unit in units) / p
        exposed = m * sum(sent.exposed_s for sent in sums) / p
        parts = {
            "compute": running * (1 - idle) - exposed - again,
            "recompute": again,
            TENSOR: exposed,
            "bubble": running * idle,
            PIPELINE: waits,
            DATA: data.exposed_s,
            "update": after,
        }
        return parts, running * idle / sum(parts.values()), {DATA: data, TENSOR: tensor, PIPELINE: across}

    def _sums(self, layout: Layout, units: Sequence[Seconds]) -> list[Traffic]:
        """Return the messages between tensor ranks of each unit for a micro-batch."""
        group = Group.of(self.machine, layout.tensor, 1, layout.world_size)
        works = self.costs.unit_work(layout.micro_batch_size, layout.tensor, BYTES[layout.dtype])
        again = 2 if layout.recompute == "full" else 1
        found = []
        known: dict[int, Traffic] = {}
        for work, unit in zip(works, units, strict=True):
            if id(work) not in known:
                is_cut, times = layout.sequence_parallel and bool(work.core), again if work.core else 1
                one = group.gathered if is_cut else group.summed
                forward = sum((one(size) for size in work.sums * times * (1 + is_cut)), Traffic())
                known[id(work)] = forward + _back(group, work, unit, layout, is_cut)
            found.append(known[id(work)])
        return found

    def _across(self, layout: Layout, bounds: Sequence[int], piece_s: float) -> tuple[Traffic, float]:
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

    def _summed(self, layout: Layout, bounds: Sequence[int], backward_s: float) -> tuple[Traffic, float]:
        """Return what replicas send in a step, and the seconds of the update."""
        machine, state = self.machine, State.of(layout.dtype, layout.optimizer)
        held = max(self.costs.stage_parameters(bounds, layout.tensor, layout.pipe))
        group = Group.of(machine, layout.data, layout.tensor, layout.world_size)
        m, stage = layout.num_micro_batches, layout.zero_stage
        gradients, weights = held * state.gradient, held * state.width
        if stage < 2:
            sent = group.summed(gradients).behind(backward_s if layout.overlaps_sums else 0.0)
        else:
            sent = group.gathered(gradients).behind(backward_s).times(m)
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
        copies = number * (state.gradient + state.width) / machine.host_bandwidth
        return moved / machine.host_update_bandwidth + copies


def estimate(config: Any, layout: Layout, machine: Machine) -> Estimate:
    """Return what ``layout`` of the model of ``config`` will take on ``machine``."""
    return Planner(config, machine).estimate(layout)


def _back(group: Group, work: Work, unit: Seconds, layout: Layout, is_cut: bool) -> Traffic:
    """Return the messages of a unit's backward; ``is_cut``: what lies between its products is cut over the ranks.

    Sums run beside the column layers' products for weights, but where the schedule puts these off; what is joined once
    more runs beside their products for the input.
    """
    beside = unit.columns if layout.overlaps_tensor else 0.0
    for_weights = 0.0 if layout.schedule == SPLITTING else beside
    if not is_cut:
        return sum((group.summed(size) for size in work.back), Traffic()).behind(for_weights)
    cut, whole = work.back[: len(work.sums)], work.back[len(work.sums) :]
    once = sum((group.gathered(size) for size in cut), Traffic())
    sums = once + sum((group.summed(size) for size in whole), Traffic())
    return once + once.behind(beside) + sums.behind(for_weights)


def _total(sent: Sequence[Traffic], pieces: Sequence[tuple[int, int]]) -> Traffic:
    return sum((sent[n] for start, stop in pieces for n in range(start, stop)), Traffic())
