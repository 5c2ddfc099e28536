"""Estimate the memory, step time and rates of one layout.

A step of m micro-batches on p stages takes ``m x mean(T) / (1 - bubble)``, where T is a stage's time for a micro-batch
including its all-reduces over tensor ranks, and ``bubble`` comes from ``tds.schedule.simulate``. Communication between
stages that does not overlap, gradient all-reduces that continue after the last backward pass, and the update are added.
On a CPU, a cost for splitting backward passes is added as well.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from megatron.costs.cost import Costs
from megatron.costs.memory import Memory
from megatron.models import registry
from megatron.planner.layout import Layout
from megatron.planner.machine import Machine
from megatron.planner.time_model import Clock, Messages, Seconds, Traffic, total
from tds.partition import chunks_on
from tds.schedule.simulate import SPLIT_PRICE, SPLITTING, bubble, share_split

NOTHING = Traffic()
TENSOR, CONTEXT, EXPERT, PIPELINE, DATA = "tensor", "context", "expert", "pipeline", "data"


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Estimated costs of a layout.

    Args:
        layout: the layout.
        bounds: bounds of the pieces, as indices of the model's units.
        memory: memory of one rank of each stage.
        parts: activity -> seconds per step; their sum is ``step_s``.
        bubble: average share of a step in which a stage waits for other stages.
        traffic: type of communication -> bytes, seconds and hidden seconds of the busiest rank.
        flops: FLOPs of the whole model per step, without recomputation; causal attention counts as half.
        peak_flops: peak FLOP/s of all devices.
        tokens: tokens per step.
    """

    layout: Layout
    bounds: Sequence[int]
    memory: Sequence[Memory]
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
        """Bytes of the device with the highest use."""
        return max(stage.total for stage in self.memory)

    def days(self, tokens: float) -> float:
        """Return the number of days for training on ``tokens`` tokens."""
        return tokens / self.tokens_per_s / 86400


class Model(NamedTuple):
    """Costs and time models of a model whose experts are distributed over a given number of ranks."""

    costs: Costs
    clock: Clock
    messages: Messages


class Planner:
    """Estimates layouts of one model on one machine; results that layouts have in common are cached.

    Args:
        config: a ``megatron.config.Config``; its model, sequence lengths and family are used.
    """

    def __init__(self, config: Any, machine: Machine, costs: Costs | None = None) -> None:
        self.config, self.machine = config, machine
        self.costs = costs or registry.costs_of(config, is_on_cpu=machine.is_cpu)
        self.num_estimates = 0
        self._names = self.costs.unit_names
        self._models: dict[int, Model] = {}
        self._bounds: dict[tuple[int, int, str], list[int]] = {}
        self._parameters: dict[tuple[int, int], tuple[int, int]] = {}
        self._units: dict[tuple[Any, ...], list[Seconds]] = {}
        self._rows: dict[tuple[Any, ...], list[Traffic]] = {}

    def estimate(self, layout: Layout) -> Estimate:
        """Return the estimate of ``layout``.

        Raises:
            ValueError: there are fewer layers than pieces.
            ConfigError: the machine has no rates for the number format.
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
        """Return the bounds of the pieces, as indices of the model's units."""
        key = layout.pipe, layout.chunks, layout.placement.kind
        if key not in self._bounds:
            self._bounds[key] = self.costs.stage_bounds(*key)
        return self._bounds[key]

    def can_cut(self, layout: Layout) -> bool:
        """Return True if the model can be split so that each piece has a layer.

        With ``pipeline_split_rank``, a T5 must also be split at this stage.
        """
        try:
            return bool(self.bounds(layout))
        except ValueError:
            return False

    def model(self, layout: Layout) -> Model:
        """Return the costs and time models of the model with its experts distributed as in ``layout``."""
        ranks = layout.expert
        if ranks not in self._models:
            costs = self.costs.shared_out(ranks)
            self._models[ranks] = Model(
                costs, Clock(costs, self.machine, self.config.family), Messages(costs, self.machine)
            )
        return self._models[ranks]

    def parameters(self, layout: Layout) -> tuple[int, int]:
        """Return (all parameters, expert parameters) of a rank if only the tensor and expert axes split the model."""
        key = layout.tensor, layout.expert
        if key not in self._parameters:
            costs = self.model(layout).costs
            bounds = [0, costs.num_units]
            num_expert = costs.stage_apart(bounds, layout.tensor)[0]
            self._parameters[key] = costs.stage_parameters(bounds, layout.tensor)[0], num_expert
        return self._parameters[key]

    def memory(self, layout: Layout) -> list[Memory]:
        """Return the memory of one rank of each stage."""
        return self.model(layout).costs.memory_per_stage(
            self.bounds(layout),
            micro_batch_size=layout.micro_batch_size,
            num_micro_batches=layout.num_micro_batches,
            tensor=layout.tensor,
            dtype=layout.dtype,
            optimizer=layout.optimizer,
            num_bf16_states=layout.num_bf16_states,
            zero=layout.zero,
            checkpoint_activations=layout.recompute == "full",
            is_selective=layout.recompute == "selective",
            sequence=layout.sequence,
            waiting=layout.waiting,
            schedule=layout.schedule,
            chunks=layout.chunks,
            placement=layout.placement.kind,
            is_compiled=layout.is_compiled,
        )

    def units(self, layout: Layout) -> list[Seconds]:
        """Return the time of each unit for a micro-batch, without communication."""
        sizes = layout.micro_batch_size, layout.tensor, layout.expert
        key = *sizes, layout.dtype, layout.sequence_parallel, layout.recompute
        if key not in self._units:
            self._units[key] = self.model(layout).clock.units(layout)
        return self._units[key]

    def rows(self, layout: Layout) -> list[Traffic]:
        """Return the expert-parallel communication of each unit for a micro-batch."""
        sizes = layout.micro_batch_size, layout.tensor, layout.expert
        key = *sizes, layout.dtype, layout.recompute, layout.world_size
        if key not in self._rows:
            self._rows[key] = self.model(layout).messages.experts(layout)
        return self._rows[key]

    def _times(self, layout: Layout, bounds: Sequence[int]) -> tuple[dict[str, float], float, dict[str, Traffic]]:
        m, p = layout.num_micro_batches, layout.pipe
        units, messages = self.units(layout), self.model(layout).messages
        sums = messages.sums(layout, units)
        exchanged = [messages.context(layout) if name.split()[-1].isdigit() else NOTHING for name in self._names]
        rows = self.rows(layout)
        seconds = [
            own.whole + sent.exposed_s + over.seconds + row.seconds
            for own, sent, over, row in zip(units, sums, exchanged, rows, strict=True)
        ]
        pieces = [sum(seconds[start:stop]) for start, stop in zip(bounds, bounds[1:], strict=False)]
        if layout.schedule in SPLITTING and self.machine.is_cpu:
            pieces = [
                own + split_s for own, split_s in zip(pieces, self._splitting(layout, bounds, units), strict=True)
            ]
        idle = self.machine.idle(bubble(p, m, layout.schedule, layout.chunks, pieces))
        running_s = m * sum(pieces) / (p * (1 - idle))
        stages = [chunks_on(bounds, p, stage, layout.placement.kind) for stage in range(p)]
        tensor = max((total(sums, own) for own in stages), key=lambda sent: sent.seconds).times(m)
        last_backward = min(sum(units[n].backward for a, b in own for n in range(a, b)) for own in stages)
        across, waits = messages.across(layout, bounds, min(pieces))
        data, update_s = messages.summed(layout, bounds, last_backward)
        recompute_s = m * sum(unit.again for unit in units) / p
        exposed_s = m * sum(sent.exposed_s for sent in sums) / p
        context_s, experts_s = (m * sum(sent.seconds for sent in each) / p for each in (exchanged, rows))
        parts = {
            "compute": running_s * (1 - idle) - exposed_s - context_s - experts_s - recompute_s,
            "recompute": recompute_s,
            TENSOR: exposed_s,
            **({CONTEXT: context_s} if layout.context > 1 else {}),
            **({EXPERT: experts_s} if layout.expert > 1 else {}),
            "bubble": running_s * idle,
            PIPELINE: waits,
            DATA: data.exposed_s,
            "update": update_s,
        }
        traffic = {DATA: data, TENSOR: tensor, PIPELINE: across}
        for size, axis, sent in ((layout.context, CONTEXT, exchanged), (layout.expert, EXPERT, rows)):
            if size > 1:
                traffic[axis] = max((total(sent, own) for own in stages), key=lambda each: each.seconds).times(m)
        return parts, running_s * idle / sum(parts.values()), traffic

    def _splitting(self, layout: Layout, bounds: Sequence[int], units: Sequence[Seconds]) -> list[float]:
        """Return the cost in seconds of deferring weight gradients in each piece, per micro-batch on average."""
        costs, placement = [], layout.placement
        for piece, (start, stop) in enumerate(zip(bounds, bounds[1:], strict=False)):
            stage = placement.stage_of(piece)
            share = share_split(layout.pipe, layout.num_micro_batches, layout.schedule, stage, layout.chunks)
            costs.append(SPLIT_PRICE * share * sum(unit.backward - unit.again for unit in units[start:stop]))
        return costs


def estimate(config: Any, layout: Layout, machine: Machine) -> Estimate:
    """Return the estimate of ``layout`` of the model of ``config`` on ``machine``."""
    return Planner(config, machine).estimate(layout)
