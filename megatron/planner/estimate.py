"""Memory, step time and rates of one layout.

A step of m micro-batches on p stages lasts ``m x mean(T) / (1 - bubble)``, T being a stage's time for a micro-batch
with its sums over tensor ranks and ``bubble`` that of ``tds.schedule.simulate``; then messages between stages that
nothing
hides, sums over replicas beyond the last backward, and the update. On a CPU split backwards have their price.
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
        """Bytes of the fullest device."""
        return max(stage.total for stage in self.memory)

    def days(self, tokens: float) -> float:
        """Return how long so many tokens take."""
        return tokens / self.tokens_per_s / 86400


class Model(NamedTuple):
    """The costs of a model with its experts on so many ranks, its seconds and its messages."""

    costs: Costs
    clock: Clock
    messages: Messages


class Planner:
    """Estimates layouts of one model on one machine; what layouts share is reckoned once.

    Args:
        config: a ``megatron.config.Config``; its model, lengths and family are read.
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
        key = layout.pipe, layout.chunks, layout.placement.kind
        if key not in self._bounds:
            self._bounds[key] = self.costs.stage_bounds(*key)
        return self._bounds[key]

    def can_cut(self, layout: Layout) -> bool:
        """Return whether each piece gets a layer: a T5 may be cut at a stage that is said."""
        try:
            return bool(self.bounds(layout))
        except ValueError:
            return False

    def model(self, layout: Layout) -> Model:
        """Return the costs of the model whose experts ``layout`` shares out, and what is reckoned from them."""
        ranks = layout.expert
        if ranks not in self._models:
            costs = self.costs.shared_out(ranks)
            self._models[ranks] = Model(
                costs, Clock(costs, self.machine, self.config.family), Messages(costs, self.machine)
            )
        return self._models[ranks]

    def parameters(self, layout: Layout) -> tuple[int, int]:
        """Return the parameters of the whole model that a tensor and expert rank would hold, and those of experts."""
        key = layout.tensor, layout.expert
        if key not in self._parameters:
            costs = self.model(layout).costs
            bounds = [0, costs.num_units]
            apart = costs.stage_apart(bounds, layout.tensor)[0]
            self._parameters[key] = costs.stage_parameters(bounds, layout.tensor)[0], apart
        return self._parameters[key]

    def memory(self, layout: Layout) -> list[Memory]:
        """Return what one rank of each stage holds."""
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
        """Return the seconds of each unit for a micro-batch, without messages."""
        sizes = layout.micro_batch_size, layout.tensor, layout.expert
        key = *sizes, layout.dtype, layout.sequence_parallel, layout.recompute
        if key not in self._units:
            self._units[key] = self.model(layout).clock.units(layout)
        return self._units[key]

    def rows(self, layout: Layout) -> list[Traffic]:
        """Return what each unit sends to experts on other ranks for a micro-batch."""
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
            pieces = [own + more for own, more in zip(pieces, self._splitting(layout, bounds, units), strict=True)]
        idle = self.machine.idle(bubble(p, m, layout.schedule, layout.chunks, pieces))
        running = m * sum(pieces) / (p * (1 - idle))
        stages = [chunks_on(bounds, p, stage, layout.placement.kind) for stage in range(p)]
        tensor = max((total(sums, own) for own in stages), key=lambda sent: sent.seconds).times(m)
        last_backward = min(sum(units[n].backward for a, b in own for n in range(a, b)) for own in stages)
        across, waits = messages.across(layout, bounds, min(pieces))
        data, after = messages.summed(layout, bounds, last_backward)
        again = m * sum(unit.again for unit in units) / p
        exposed = m * sum(sent.exposed_s for sent in sums) / p
        over_context, over_experts = (m * sum(sent.seconds for sent in each) / p for each in (exchanged, rows))
        parts = {
            "compute": running * (1 - idle) - exposed - over_context - over_experts - again,
            "recompute": again,
            TENSOR: exposed,
            **({CONTEXT: over_context} if layout.context > 1 else {}),
            **({EXPERT: over_experts} if layout.expert > 1 else {}),
            "bubble": running * idle,
            PIPELINE: waits,
            DATA: data.exposed_s,
            "update": after,
        }
        traffic = {DATA: data, TENSOR: tensor, PIPELINE: across}
        for size, kind, sent in ((layout.context, CONTEXT, exchanged), (layout.expert, EXPERT, rows)):
            if size > 1:
                traffic[kind] = max((total(sent, own) for own in stages), key=lambda each: each.seconds).times(m)
        return parts, running * idle / sum(parts.values()), traffic

    def _splitting(self, layout: Layout, bounds: Sequence[int], units: Sequence[Seconds]) -> list[float]:
        """Return what putting the gradients of weights off costs in each piece, for a micro-batch on average."""
        found, placement = [], layout.placement
        for piece, (start, stop) in enumerate(zip(bounds, bounds[1:], strict=False)):
            stage = placement.stage_of(piece)
            share = share_split(layout.pipe, layout.num_micro_batches, layout.schedule, stage, layout.chunks)
            found.append(SPLIT_PRICE * share * sum(unit.backward - unit.again for unit in units[start:stop]))
        return found


def estimate(config: Any, layout: Layout, machine: Machine) -> Estimate:
    """Return what ``layout`` of the model of ``config`` will take on ``machine``."""
    return Planner(config, machine).estimate(layout)
