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

from megatron.config.optimizer import ROWWISE
from megatron.costs.cost import Costs
from megatron.costs.memory import Memory, lacks_grouped_fp8, mixed_peak
from megatron.errors import ConfigError
from megatron.models import registry
from megatron.planner.layout import Layout
from megatron.planner.machine import Machine
from megatron.planner.time_model import CommunicationModel, ComputeModel, Seconds, Traffic, sum_traffic
from tds.partition import chunks_on
from tds.schedule.simulate import SPLIT_OVERHEAD, SPLIT_SCHEDULES, bubble, split_fraction

NO_TRAFFIC = Traffic()
TENSOR, CONTEXT, EXPERT, PIPELINE, DATA = "tensor", "context", "expert", "pipeline", "data"


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A layout's estimated costs.

    Args:
        layout: the layout.
        bounds: virtual-stage bounds, as indices of the model's units.
        memory: memory per rank, by stage.
        seconds_by_activity: activity -> seconds per step; their sum is ``step_s``.
        bubble: average share of a step that a stage waits for other stages.
        traffic: communication type -> bytes, seconds and hidden seconds on the busiest rank.
        flops: FLOPs per step for the full model, without recomputation; causal attention counts as half.
        peak_flops: peak FLOP/s over all devices, weighted by the shares of 16 bits and FP8.
        tokens: tokens per step.
    """

    layout: Layout
    bounds: Sequence[int]
    memory: Sequence[Memory]
    seconds_by_activity: Mapping[str, float]
    bubble: float
    traffic: Mapping[str, Traffic]
    flops: float
    peak_flops: float
    tokens: int

    @property
    def step_s(self) -> float:
        return sum(self.seconds_by_activity.values())

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.step_s

    @property
    def mfu(self) -> float:
        return self.flops / self.step_s / self.peak_flops

    @property
    def max_bytes(self) -> int:
        """Bytes on the fullest device."""
        return max(stage.total for stage in self.memory)

    def days(self, tokens: float) -> float:
        """Return the days needed to train on ``tokens`` tokens."""
        return tokens / self.tokens_per_s / 86400


class Model(NamedTuple):
    """Costs and time models for one expert-parallel size."""

    costs: Costs
    compute: ComputeModel
    communication: CommunicationModel


class Planner:
    """Estimates layouts of one model on one machine; results that layouts share are cached.

    Args:
        config: a ``megatron.config.Config``; its model, sequence lengths and family are used.
    """

    def __init__(self, config: Any, machine: Machine, costs: Costs | None = None) -> None:
        self.config, self.machine = config, machine
        self.costs = costs or registry.costs_of(config, is_on_cpu=machine.is_cpu)
        self.num_estimates = 0
        self._unit_names, self._flops_per_sample = self.costs.unit_names, self.costs.flops_per_sample
        self._models: dict[int, Model] = {}
        self._bounds: dict[tuple[int, int, str], list[int]] = {}
        self._parameters: dict[tuple[int, int], tuple[int, int]] = {}
        self._unit_seconds: dict[tuple[Any, ...], list[Seconds]] = {}
        self._expert_traffic: dict[tuple[Any, ...], list[Traffic]] = {}

    def estimate(self, layout: Layout) -> Estimate:
        """Estimate ``layout``.

        Raises:
            ValueError: there are fewer layers than virtual stages.
            ConfigError: the machine has no rates for the dtype, or no grouped products in FP8 for experts.
        """
        self.num_estimates += 1
        self._check_fp8_experts()
        bounds = self.bounds(layout)
        seconds_by_activity, idle, traffic = self._time_breakdown(layout, bounds)
        world = layout.world_size
        peak = self.machine.peak_flops.get(layout.dtype) or self.machine.product_rate(layout.dtype, 1e9)
        return Estimate(
            layout=layout,
            bounds=bounds,
            memory=self.memory(layout),
            seconds_by_activity=seconds_by_activity,
            bubble=idle,
            traffic=traffic,
            flops=layout.global_batch_size * self._flops_per_sample,
            peak_flops=world * (peak if self.machine.is_cpu else mixed_peak(peak, self.costs.fp8_share)),
            tokens=layout.global_batch_size * self.config.tokens_per_sample,
        )

    def _check_fp8_experts(self) -> None:
        precision, machine = self.config.precision, self.machine
        is_rowwise = precision.fp8_format is not None and precision.fp8_recipe == ROWWISE
        if is_rowwise and self.config.model.num_experts and not machine.is_cpu and lacks_grouped_fp8(machine.name):
            raise ConfigError(
                "--fp8-format with --num-experts needs a GPU with grouped products in FP8 (H100, H200, H20, GH200), "
                f"got {machine.name}. Use --fp8-recipe blockwise, which is emulated, or remove --fp8-format"
            )

    def bounds(self, layout: Layout) -> list[int]:
        """Return the virtual-stage bounds, as indices of the model's units."""
        key = layout.pipe, layout.chunks, layout.placement.style
        if key not in self._bounds:
            self._bounds[key] = self.costs.stage_bounds(*key)
        return self._bounds[key]

    def can_split(self, layout: Layout) -> bool:
        """Return True if the model can be split so that each virtual stage has a layer.

        With ``pipeline_split_rank``, a T5 must also be split at this stage.
        """
        try:
            return bool(self.bounds(layout))
        except ValueError:
            return False

    def model(self, layout: Layout) -> Model:
        """Return the costs and time models for the expert distribution in ``layout``."""
        ranks = layout.expert
        if ranks not in self._models:
            costs = self.costs.with_expert_ranks(ranks)
            self._models[ranks] = Model(
                costs, ComputeModel(costs, self.machine, self.config.family), CommunicationModel(costs, self.machine)
            )
        return self._models[ranks]

    def parameters(self, layout: Layout) -> tuple[int, int]:
        """Return (all parameters, expert parameters) per rank if only the tensor and expert axes split the model."""
        key = layout.tensor, layout.expert
        if key not in self._parameters:
            costs = self.model(layout).costs
            bounds = [0, costs.num_units]
            num_expert = costs.stage_distributed_parameters(bounds, layout.tensor)[0]
            self._parameters[key] = costs.stage_parameters(bounds, layout.tensor)[0], num_expert
        return self._parameters[key]

    def memory(self, layout: Layout) -> list[Memory]:
        """Return the memory per rank, by stage."""
        return self.model(layout).costs.memory_per_stage(
            self.bounds(layout),
            micro_batch_size=layout.micro_batch_size,
            num_micro_batches=layout.num_micro_batches,
            tensor=layout.tensor,
            dtype=layout.dtype,
            optimizer=layout.optimizer,
            num_bf16_states=layout.num_bf16_states,
            num_8bit_states=layout.num_8bit_states,
            zero=layout.zero,
            checkpoint_activations=layout.recompute == "full",
            is_selective=layout.recompute == "selective",
            sequence=layout.sequence,
            waiting=layout.waiting,
            schedule=layout.schedule,
            chunks=layout.chunks,
            placement=layout.placement.style,
            is_compiled=layout.is_compiled,
        )

    def unit_seconds(self, layout: Layout) -> list[Seconds]:
        """Return the time per unit for a micro-batch, without communication."""
        batch_tensor_expert = layout.micro_batch_size, layout.tensor, layout.expert
        compute = self.model(layout).compute
        quantizations = compute.weight_quantizations(layout) if self.config.precision.fp8_format is not None else 0.0
        key = *batch_tensor_expert, layout.dtype, layout.sequence_parallel, layout.recompute, quantizations
        if key not in self._unit_seconds:
            self._unit_seconds[key] = compute.units(layout)
        return self._unit_seconds[key]

    def expert_traffic(self, layout: Layout) -> list[Traffic]:
        """Return the expert-parallel communication per unit for a micro-batch."""
        batch_tensor_expert = layout.micro_batch_size, layout.tensor, layout.expert
        key = *batch_tensor_expert, layout.dtype, layout.recompute, layout.world_size
        if key not in self._expert_traffic:
            self._expert_traffic[key] = self.model(layout).communication.expert_traffic(layout)
        return self._expert_traffic[key]

    def _time_breakdown(
        self, layout: Layout, bounds: Sequence[int]
    ) -> tuple[dict[str, float], float, dict[str, Traffic]]:
        m, p = layout.num_micro_batches, layout.pipe
        unit_seconds, communication = self.unit_seconds(layout), self.model(layout).communication
        tensor_by_unit = communication.tensor_traffic(layout, unit_seconds)
        context_by_unit = [
            communication.context_traffic(layout, unit)
            if layout.context > 1 and name.split()[-1].isdigit()
            else NO_TRAFFIC
            for unit, name in enumerate(self._unit_names)
        ]
        expert_by_unit = self.expert_traffic(layout)
        seconds = [
            entry.total + sent.exposed_s + over.seconds + row.seconds
            for entry, sent, over, row in zip(
                unit_seconds, tensor_by_unit, context_by_unit, expert_by_unit, strict=True
            )
        ]
        chunk_seconds = [sum(seconds[start:stop]) for start, stop in zip(bounds, bounds[1:], strict=False)]
        if layout.schedule in SPLIT_SCHEDULES and self.machine.is_cpu:
            chunk_seconds = [
                entry + split_s
                for entry, split_s in zip(
                    chunk_seconds, self._deferral_costs(layout, bounds, unit_seconds), strict=True
                )
            ]
        idle = self.machine.idle(bubble(p, m, layout.schedule, layout.chunks, chunk_seconds))
        running_s = m * sum(chunk_seconds) / (p * (1 - idle))
        stages = [chunks_on(bounds, p, stage, layout.placement.style) for stage in range(p)]
        tensor = max((sum_traffic(tensor_by_unit, entry) for entry in stages), key=lambda sent: sent.seconds).repeated(
            m
        )
        last_backward = min(sum(unit_seconds[n].backward for a, b in entry for n in range(a, b)) for entry in stages)
        pipeline, pipeline_wait_s = communication.pipeline_traffic(layout, bounds, min(chunk_seconds))
        data, update_s = communication.data_traffic(layout, bounds, last_backward)
        recompute_s = m * sum(unit.recompute for unit in unit_seconds) / p
        exposed_s = m * sum(sent.exposed_s for sent in tensor_by_unit) / p
        context_s, experts_s = (
            m * sum(sent.seconds for sent in axis_traffic) / p for axis_traffic in (context_by_unit, expert_by_unit)
        )
        seconds_by_activity = {
            "compute": running_s * (1 - idle) - exposed_s - context_s - experts_s - recompute_s,
            "recompute": recompute_s,
            TENSOR: exposed_s,
            **({CONTEXT: context_s} if layout.context > 1 else {}),
            **({EXPERT: experts_s} if layout.expert > 1 else {}),
            "bubble": running_s * idle,
            PIPELINE: pipeline_wait_s,
            DATA: data.exposed_s,
            "update": update_s,
        }
        traffic = {DATA: data, TENSOR: tensor, PIPELINE: pipeline}
        for size, axis, sent in ((layout.context, CONTEXT, context_by_unit), (layout.expert, EXPERT, expert_by_unit)):
            if size > 1:
                traffic[axis] = max(
                    (sum_traffic(sent, entry) for entry in stages), key=lambda axis_traffic: axis_traffic.seconds
                ).repeated(m)
        return seconds_by_activity, running_s * idle / sum(seconds_by_activity.values()), traffic

    def _deferral_costs(self, layout: Layout, bounds: Sequence[int], units: Sequence[Seconds]) -> list[float]:
        """Return the mean cost of deferring weight gradients, in seconds per micro-batch and virtual stage."""
        costs, placement = [], layout.placement
        for chunk_idx, (start, stop) in enumerate(zip(bounds, bounds[1:], strict=False)):
            stage = placement.stage_of(chunk_idx)
            share = split_fraction(layout.pipe, layout.num_micro_batches, layout.schedule, stage, layout.chunks)
            costs.append(SPLIT_OVERHEAD * share * sum(unit.backward - unit.recompute for unit in units[start:stop]))
        return costs


def estimate(config: Any, layout: Layout, machine: Machine) -> Estimate:
    """Estimate ``layout`` for the model in ``config`` on ``machine``."""
    return Planner(config, machine).estimate(layout)
