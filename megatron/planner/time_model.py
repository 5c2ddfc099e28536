"""Time of the units of a model on one rank, and of the communication of a step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from megatron.config.newton_schulz import newton_schulz_flops
from megatron.config.optimizer import ROWWISE
from megatron.costs.cost import Costs, Product, Work
from megatron.costs.memory import BYTES, GRADIENT_SHARDING_STAGE, SavedBytes, State
from megatron.planner.layout import Layout
from megatron.planner.machine import HEAD, LAYER, SPLIT_SUFFIX, EfficiencyFactor, EfficiencyFactors, Link, Machine, Wire
from tds.schedule import V
from tds.schedule.simulate import SPLIT_SCHEDULES

# Time that one rank spends in the units of a model for one micro-batch, without communication.
#
# | part | forward | backward |
# |---|---|---|
# | products (matmuls) | flops / rate(side) | twice as many; the core of fused attention 2.5 times |
# | a pass | bytes saved / memory bandwidth; for the head, bytes of the logits | the same |
# | operations | overhead per operation | twice as many |
# | gradients of weights | | accumulated over micro-batches: 10 bytes per parameter in 16 bits, 12 bytes in 32 bits |
# | quantization to FP8 | 5 bytes per element of both factors / memory bandwidth, 8 kernels per product; for the weight once per step | the same |  # noqa: E501
#
# In FP8 layers, output and input gradient of a product have the rate of FP8, and weight gradients that of 16 bits.
# The machine's ``EfficiencyFactors`` multiply matmuls and passes, with separate factors for layers that are split over
# tensor ranks. Recomputation adds a forward pass of the layers, or of the attention cores, to the backward pass.

CORE_BACKWARD = 2.5
"""Ratio of backward to forward time of a fused attention core: backward recomputes the scores (5 matmuls for 2)."""
QUANTIZATION_BYTES = 5
"""Bytes read and written per element of a factor: maxima read 2 bytes, quantization reads 2 and writes 1."""
QUANTIZATION_KERNELS = 4
"""Kernels per factor of a product: its maxima, its quantization, and two that compute the scales."""


@dataclass(frozen=True)
class Seconds:
    """Times of one or several units, in seconds.

    Args:
        backward: includes ``recompute``.
        recompute: recomputation.
        weight_grads: part of ``backward``: matmuls for weight gradients.
        column_weight_grads: part of ``weight_grads`` in column-parallel layers, which can overlap with their
            all-reduce.
    """

    forward: float = 0.0
    backward: float = 0.0
    recompute: float = 0.0
    weight_grads: float = 0.0
    column_weight_grads: float = 0.0

    @property
    def total(self) -> float:
        return self.forward + self.backward


@dataclass(frozen=True)
class OperationTimes:
    """Times of a unit's operations in seconds, before efficiency factors.

    Args:
        products: matmuls with weights in forward; the matmuls for input gradients take the same time.
        weight_grads: matmuls for weight gradients.
        columns: part of ``weight_grads`` in column-parallel layers.
        core, core_backward: attention core in forward and in backward.
        activation_pass: one pass over the saved activations.
        score_pass: one pass over the attention scores.
        launch_overhead: operation overhead in a forward pass.
        grad_accumulation: accumulation of weight gradients.
        unscaled_forward, unscaled_backward: time of forward and of backward to which no factor applies.
        core_pass: one pass over the activations that attention saves between its matmuls.
        is_recomputed: full recomputation runs the unit again.
    """

    products: float
    weight_grads: float
    columns: float
    core: float
    core_backward: float
    activation_pass: float
    score_pass: float
    launch_overhead: float
    grad_accumulation: float
    unscaled_forward: float = 0.0
    unscaled_backward: float = 0.0
    core_pass: float = 0.0
    is_recomputed: bool = False

    def forward(self, efficiency: EfficiencyFactor) -> float:
        """Return the time of a forward pass in seconds."""
        return efficiency.predict(self.forward_terms) + self.forward_fixed_s

    def backward(self, efficiency: EfficiencyFactor) -> float:
        """Return the time of a backward pass in seconds, without recomputation."""
        return efficiency.predict(self.backward_terms) + self.backward_fixed_s

    @property
    def forward_terms(self) -> tuple[float, float, float]:
        """Times of (matmuls, activation pass, score pass), which the efficiency factors apply to."""
        return self.products + self.core, self.activation_pass, self.score_pass

    @property
    def backward_terms(self) -> tuple[float, float, float]:
        return self.products + self.weight_grads + self.core_backward, self.activation_pass, self.score_pass

    @property
    def forward_fixed_s(self) -> float:
        """Time that no factor applies to."""
        return self.launch_overhead + self.unscaled_forward

    @property
    def backward_fixed_s(self) -> float:
        return 2 * self.launch_overhead + self.grad_accumulation + self.unscaled_backward


class ComputeModel:
    """Computes the times of a model's units on ``machine``; every method takes the layout as an argument."""

    def __init__(self, costs: Costs, machine: Machine, family: str) -> None:
        self._costs, self._machine, self._family = costs, machine, family
        self._unit_types = [f"{family} {_unit_type(name)}" for name in costs.unit_names]

    def units(self, layout: Layout) -> list[Seconds]:
        """Return the time per unit for a micro-batch."""
        cache: dict[int, Seconds] = {}  # equal layers share one object
        seconds = []
        for idx, operations in enumerate(self.operation_times(layout)):
            if id(operations) not in cache:
                cache[id(operations)] = self._unit(idx, operations, layout)
            seconds.append(cache[id(operations)])
        return seconds

    def operation_times(self, layout: Layout) -> list[OperationTimes]:
        """Return operation times by unit; equal layers share one object."""
        b, t, width = layout.micro_batch_size, layout.tensor, BYTES[layout.dtype]
        works = self._costs.unit_work(b, t, width)
        saved = self._costs.unit_saved_bytes(b, t, width, layout.sequence)
        parameters_by_unit = self._costs.unit_parameters(t)
        cache: dict[tuple[int, SavedBytes, int], OperationTimes] = {}
        times_by_unit = []
        for idx, (work, saved_bytes, parameters) in enumerate(zip(works, saved, parameters_by_unit, strict=True)):
            key = id(work), saved_bytes, parameters
            if key not in cache:
                is_head = idx == len(works) - 1
                logits = self._costs.logit_bytes(b, t, width) if is_head else None
                cache[key] = self._operation_times(work, saved_bytes, parameters, logits, layout)
            times_by_unit.append(cache[key])
        return times_by_unit

    def factors(self, unit_idx: int, layout: Layout) -> EfficiencyFactors:
        """Return the efficiency factors for the unit with index ``unit_idx`` in ``layout``."""
        unit_type, default = self._unit_types[unit_idx], HEAD if unit_idx == len(self._unit_types) - 1 else LAYER
        unsplit = self._machine.efficiency(layout.dtype, unit_type, default)
        return (
            self._machine.efficiency(layout.dtype, unit_type + SPLIT_SUFFIX, unsplit) if layout.tensor > 1 else unsplit
        )

    def _operation_times(
        self, work: Work, saved: SavedBytes, parameters: int, logits: int | None, layout: Layout
    ) -> OperationTimes:
        machine = self._machine
        weight_grads, core = (self._products(subset, layout.dtype) for subset in (work.products, work.core))
        quantization_s = self._quantization_s(work, layout)
        activation_pass_s = saved.full / machine.memory_bandwidth
        is_head = logits is not None
        return OperationTimes(
            products=weight_grads - self._fp8_gain_s(work, layout.dtype),
            weight_grads=weight_grads,
            columns=self._products([product for product in work.products if product.is_column], layout.dtype),
            core=core,
            core_backward=(2 if saved.core else CORE_BACKWARD) * core,
            activation_pass=(logits or 0) / machine.memory_bandwidth if is_head else activation_pass_s,
            score_pass=_scores(work) * BYTES[layout.dtype] / machine.memory_bandwidth,
            launch_overhead=work.operations * machine.overhead_s,
            grad_accumulation=(BYTES[layout.dtype] + 8) * parameters / machine.memory_bandwidth,
            unscaled_forward=LAYER.forward.passes * activation_pass_s * is_head + quantization_s[0],
            unscaled_backward=LAYER.backward.passes * activation_pass_s * is_head + quantization_s[1],
            core_pass=saved.core / machine.memory_bandwidth,
            is_recomputed=bool(saved.input),
        )

    def _unit(self, unit_idx: int, operations: OperationTimes, layout: Layout) -> Seconds:
        factors = self.factors(unit_idx, layout)
        forward, backward = operations.forward(factors.forward), operations.backward(factors.backward)
        recompute_s = 0.0
        if layout.recompute == "full" and operations.is_recomputed:
            recompute_s = forward
        elif layout.recompute == "selective" and operations.is_recomputed:
            recompute_s = factors.forward.predict((operations.core, operations.core_pass, operations.score_pass))
        factor = factors.backward.products
        return Seconds(
            forward, backward + recompute_s, recompute_s, factor * operations.weight_grads, factor * operations.columns
        )

    def _products(self, products: Sequence[Product], dtype: str) -> float:
        return sum(product.flops / self._machine.product_rate(dtype, product.side) for product in products)

    def _fp8_gain_s(self, work: Work, dtype: str) -> float:
        """Return the time that the rate of FP8 saves in forward, compared with products in ``dtype``."""
        if work.fp8_recipe != ROWWISE:  # products of blocks are emulated in bf16
            return 0.0
        fp8_s = sum(product.flops / self._machine.fp8_rate(product.side) for product in work.fp8_products)
        return self._products(work.fp8_products, dtype) - fp8_s

    def weight_quantizations(self, layout: Layout) -> float:
        """Return how often each weight is quantized per micro-batch: once per step, or always with ZeRO 3."""
        return 1.0 if layout.zero.shards_weights else 1 / layout.num_micro_batches

    def _quantization_s(self, work: Work, layout: Layout) -> tuple[float, float]:
        """Return the time to quantize the factors in (forward, backward) of a micro-batch."""
        machine, products = self._machine, work.fp8_products
        weight_share = self.weight_quantizations(layout)
        weights = weight_share * sum(product.weights for product in products)
        launch_s = QUANTIZATION_KERNELS * (1 + weight_share) * len(products) * machine.overhead_s
        forward, backward = (
            sum(product.rows * inner * product.count for product, inner in zip(products, inner_sizes, strict=True))
            for inner_sizes in ([p.inner for p in products], [p.columns for p in products])
        )
        return (
            QUANTIZATION_BYTES * (forward + weights) / machine.memory_bandwidth + launch_s,
            QUANTIZATION_BYTES * (backward + weights) / machine.memory_bandwidth + launch_s,
        )


def _unit_type(unit: str) -> str:
    """Return the unit type: the name without layer number and without the prefix of multi-token prediction."""
    unit = unit.removeprefix("MTP ")
    return unit.rsplit(" ", 1)[0] if unit.split()[-1].isdigit() else unit


def _scores(work: Work) -> float:
    """Return a unit's number of attention scores: the outputs of the first matmul of each pair in ``work.core``."""
    return sum(product.rows * product.columns * product.count for product in work.core[::2])


# Communication of a step: bytes sent by a rank, time, and the part that overlaps with other work.
#
# | type | per | a rank of n sends |
# |---|---|---|
# | tensor | all-reduce of activations of X bytes over t ranks | 2 (t - 1) / t X |
# | ... in layers in FP8 | an all-reduce of row maxima for each all-reduce above: 4 bytes per token, and at most 4 per row of the weight | 2 (t - 1) / t X |  # noqa: E501
# | ... with sequence parallelism | instead of an all-reduce: in forward an all-gather and a reduce-scatter; in backward two all-gathers (of the output's gradient, and of the input again, which zb-h1 and compiled layers save) and a reduce-scatter | 2 (t - 1) / t X; 3 (t - 1) / t X |  # noqa: E501
# | context | layer and micro-batch: keys, values of X bytes gathered twice, gradients scattered | 3 (c - 1) / c X |
# | ... a2a | queries, keys, values, context of X bytes in forward and backward; again if recomputed | 2 (c - 1) / c^2 X |  # noqa: E501
# | ... recurrent mixers | states and last inputs of X bytes gathered, again if recomputed; gradients scattered | 2 (c - 1) / c X |  # noqa: E501
# | expert | layer with experts and micro-batch: dispatch and combine rows of X bytes, in forward and in backward; again if recomputed | 4 (e - 1) / e X |  # noqa: E501
# | pipeline | boundary and micro-batch, each way | s b h numbers; in a T5's decoder stages also the encoder's output |
# | data | all-reduce of gradients over d replicas: ZeRO 0, on CPUs also 1 | 2 (d - 1) / d x 4 bytes per parameter |
# | ... ZeRO 1 on GPUs | reduce-scatter instead of the all-reduce | (d - 1) / d x 4 |
# | ... of experts distributed over e ranks | all-reduce over d / e replicas, after the last backward; not scattered | 2 (d / e - 1) / (d / e) x 4 |  # noqa: E501
# | ... ZeRO 1 and 2 also | weights after the update | (d - 1) / d x a weight |
# | ... ZeRO 2 | micro-batch, instead of the all-reduce | (d - 1) / d x 4 |
# | ... ZeRO 3 | micro-batch: as ZeRO 2, and weights gathered twice, a layer ahead | (d - 1) / d x (4 + 2 x a weight) |
#
# Backward starts the all-reduce of a column-parallel layer's input gradient before its weight-gradient matmul, and
# gathers its input during the input-gradient matmul. All other tensor-parallel communication is exposed, including the
# head's.
#
# A group within a node uses the node's links. A group over several nodes shares a node's network cards with other
# groups. The bandwidth of such a group is the number of its members in a node times the bandwidth per device. The
# tensor axis is innermost, then the data axis.
#
# Sources: Narayanan et al. 2021, section 3; Rajbhandari et al. 2020, "ZeRO", section 7.


@dataclass(frozen=True)
class Traffic:
    """One rank's communication: bytes sent, duration, and the duration that overlaps with other work."""

    bytes: float = 0.0
    seconds: float = 0.0
    hidden_s: float = 0.0

    @property
    def exposed_s(self) -> float:
        return self.seconds - self.hidden_s

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(self.bytes + other.bytes, self.seconds + other.seconds, self.hidden_s + other.hidden_s)

    def repeated(self, count: float) -> Traffic:
        """Return the traffic of ``count`` repetitions."""
        return Traffic(count * self.bytes, count * self.seconds, count * self.hidden_s)

    def hidden_by(self, seconds: float) -> Traffic:
        """Hide up to ``seconds`` behind other work."""
        return Traffic(self.bytes, self.seconds, min(self.seconds, max(seconds, 0.0)))


@dataclass(frozen=True)
class Group:
    """A group of ``size`` ranks, whose global ranks differ by ``stride``, and the link between the ranks."""

    size: int
    link: Link
    speed: float = 1.0
    max_link: Link | None = None  # upper bound: a group over several nodes is not faster than a group within a node

    @classmethod
    def on_machine(cls, machine: Machine, size: int, stride: int, world: int) -> Group:
        """Return the slowest group of ``size`` ranks with ``stride`` among ``world`` ranks on ``machine``."""
        if world <= machine.devices_per_node or machine.devices_per_node % (size * stride) == 0:
            return cls(size, machine.intra)
        return cls(size, machine.inter, max(machine.devices_per_node / stride, 1.0), machine.intra)

    def all_reduce(self, num_bytes: float) -> Traffic:
        """Return the traffic of an all-reduce over ``num_bytes``."""
        return self._ring("all_reduce", 2 * num_bytes)

    def all_gather(self, num_bytes: float) -> Traffic:
        """Return the traffic of an all-gather with a result of ``num_bytes``."""
        return self._ring("gather", num_bytes)

    def reduce_scatter(self, num_bytes: float) -> Traffic:
        """Return the traffic of a reduce-scatter with an input of ``num_bytes``."""
        return self._ring("scatter", num_bytes)

    def send(self, num_bytes: float) -> Traffic:
        """Return the traffic of a point-to-point message between neighbours in the group."""
        wire: Wire = self.link.send
        return Traffic(num_bytes, wire.latency_s + num_bytes / self._bandwidth("send")) if self.size > 1 else Traffic()

    def _ring(self, collective: str, num_bytes: float) -> Traffic:
        if self.size == 1:
            return Traffic()
        num_sent = (self.size - 1) / self.size * num_bytes
        wire: Wire = getattr(self.link, collective)
        return Traffic(num_sent, wire.latency_s * math.log2(self.size) + num_sent / self._bandwidth(collective))

    def _bandwidth(self, collective: str) -> float:
        wire: Wire = getattr(self.link, collective)
        limit = math.inf if self.max_link is None else getattr(self.max_link, collective).bandwidth
        return float(min(wire.bandwidth * self.speed, limit))


# Communication of a layout in a step (within units, over stage boundaries, of gradients), and the update.
#
# The table above lists the types. On a CPU, communication uses the cores that compute, so nothing overlaps.


def _gathered_and_scattered(group: Group, message_bytes: Sequence[int], num_gathers: int) -> Traffic:
    """Return the traffic of all-gathers, repeated, and of the reduce-scatters of their gradients."""
    gathers = sum((group.all_gather(size) for size in message_bytes), Traffic()).repeated(num_gathers)
    return gathers + sum((group.reduce_scatter(size) for size in message_bytes), Traffic())


class CommunicationModel:
    """Computes the communication of one model's layouts on ``machine``."""

    def __init__(self, costs: Costs, machine: Machine) -> None:
        self.costs, self.machine = costs, machine

    def _axis_group(self, axis: str, layout: Layout) -> Group:
        return Group.on_machine(self.machine, getattr(layout, axis), layout.stride(axis), layout.world_size)

    def tensor_traffic(self, layout: Layout, units: Sequence[Seconds]) -> list[Traffic]:
        """Return the tensor-parallel communication per unit for a micro-batch."""
        return [forward + backward for forward, backward in self.tensor_traffic_by_pass(layout, units)]

    def context_traffic(self, layout: Layout, unit: int = 1) -> Traffic:
        """Return the context-parallel communication of the layer ``unit`` for a micro-batch. It never overlaps."""
        group = self._axis_group("context", layout)
        sizes = layout.micro_batch_size, layout.tensor, BYTES[layout.dtype]
        state_bytes = self.costs.state_messages(*sizes, unit)
        states = _gathered_and_scattered(group, state_bytes, 1 if layout.recompute == "none" else 2)
        ranks, stride = self.costs.context_head_ranks(unit), layout.stride("context")
        if ranks > 1:
            times = 2 if layout.recompute == "none" else 3
            inner = Group.on_machine(self.machine, ranks, stride, layout.world_size)
            exchanged = self.costs.head_messages(*sizes, unit)
            moved = sum((inner.all_gather(size / layout.context) for size in exchanged), Traffic())
            states += moved.repeated(times)
        if not self.costs.gathers_over_all_context_ranks:
            group = Group.on_machine(self.machine, layout.context // ranks, stride * ranks, layout.world_size)
        num_gathers = 1 if self.costs.saves_context_messages and layout.recompute == "none" else 2
        return states + _gathered_and_scattered(group, self.costs.context_messages(*sizes, unit), num_gathers)

    def expert_traffic(self, layout: Layout) -> list[Traffic]:
        """Return the expert-parallel communication per unit for a micro-batch. It never overlaps.

        The experts are assumed to be evenly loaded. The few bytes of row counts are left out.
        """
        group = Group.on_machine(self.machine, layout.expert, layout.expert_shards, layout.world_size)
        message_bytes = self.costs.expert_messages(layout.micro_batch_size, layout.tensor, BYTES[layout.dtype])
        times = 3 if layout.recompute == "full" else 2
        return [
            sum((group.all_gather(size) for size in unit_sizes), Traffic()).repeated(times)
            for unit_sizes in message_bytes
        ]

    def tensor_traffic_by_pass(self, layout: Layout, units: Sequence[Seconds]) -> list[tuple[Traffic, Traffic]]:
        """Return the tensor-parallel communication per unit as (forward, backward)."""
        group = self._axis_group("tensor", layout)
        works = self.costs.unit_work(layout.micro_batch_size, layout.tensor, BYTES[layout.dtype])
        num_forwards = 2 if layout.recompute == "full" else 1
        traffic = []
        cache: dict[int, tuple[Traffic, Traffic]] = {}
        for work, unit in zip(works, units, strict=True):
            if id(work) not in cache:
                is_sharded, times = layout.sequence_parallel and bool(work.core), num_forwards if work.core else 1
                collectives = (group.all_gather, group.reduce_scatter) if is_sharded else (group.all_reduce,)
                forward = sum(
                    (collective(size).repeated(times) for size in work.reduced_bytes for collective in collectives),
                    Traffic(),
                )
                backward = self._backward_traffic(group, work, unit, layout, is_sharded)
                if work.maxima_bytes:
                    maxima = group.all_reduce(work.maxima_bytes)
                    forward += maxima.repeated(times * len(work.reduced_bytes))
                    backward += maxima.repeated(len(work.backward_reduced_bytes))
                cache[id(work)] = forward, backward
            traffic.append(cache[id(work)])
        return traffic

    def pipeline_traffic(self, layout: Layout, bounds: Sequence[int], chunk_s: float) -> tuple[Traffic, float]:
        """Return the traffic in a step at the busiest stage boundary, and the seconds that stages wait for messages.

        The first micro-batch waits at each boundary, in both directions, and with placement V in both chunks. Other
        micro-batches only wait if their message takes longer than half a virtual stage's time.

        Args:
            chunk_s: seconds per micro-batch of the fastest virtual stage.
        """
        if layout.pipe == 1:
            return Traffic(), 0.0
        width, placement = BYTES[layout.dtype], layout.placement
        group = self._axis_group("pipe", layout)
        message_bytes = [
            self.costs.boundary_bytes(bound, layout.micro_batch_size, width) / layout.sequence
            for chunk_idx, bound in enumerate(bounds[1:-1])
            if placement.stage_of(chunk_idx) != placement.stage_of(chunk_idx + 1)
        ]
        m, p, c, is_v = layout.num_micro_batches, layout.pipe, layout.chunks, placement.style == V
        message = group.send(max(message_bytes))
        num_messages = 2 * m * (c if c == 1 or is_v else (c * p - 1) / p)
        slow = max(message.seconds - chunk_s / 2, 0.0)
        waits = 2 * (p - 1) * (c if is_v else 1) * message.seconds + 2 * m * c * slow
        all_messages = message.repeated(num_messages)
        return all_messages.hidden_by(all_messages.seconds - waits), waits

    def data_traffic(self, layout: Layout, bounds: Sequence[int], backward_s: float) -> tuple[Traffic, float]:
        """Return the data-parallel traffic per step, and the duration of the update in seconds.

        Args:
            backward_s: seconds per backward pass, which gradient communication can overlap with.
        """
        machine, state = self.machine, layout.state_bytes
        placement_args = layout.pipe, layout.placement.style
        parameters_by_stage = self.costs.stage_parameters(bounds, layout.tensor, *placement_args)
        fullest = parameters_by_stage.index(max(parameters_by_stage))
        num_expert = self.costs.stage_distributed_parameters(bounds, layout.tensor, *placement_args)[fullest]
        num_dense = parameters_by_stage[fullest] - num_expert
        group = Group.on_machine(machine, layout.data * layout.context, layout.stride("context"), layout.world_size)
        expert_group = Group.on_machine(
            machine, layout.expert_replicas, layout.expert_shards * layout.expert, layout.world_size
        )
        sent = self._replica_traffic(layout, group, num_dense, state, backward_s)
        if num_expert:
            sent += self._expert_replica_traffic(layout, expert_group, num_expert, state, backward_s)
        if layout.optimizer not in ("muon", "adamuon"):
            return sent, self._update(layout, num_dense, num_expert, state)
        matrices_of_stages = self.costs.stage_matrices(bounds, layout.pipe, placement=layout.placement.style)
        products = max(matrices_of_stages, key=lambda expert_group: sum(one.weights for one in expert_group))
        matrices = sum(product.weights for product in products) // layout.tensor
        seconds = self._update(layout, num_dense, num_expert, state, matrices)
        for is_distributed, replicas, shards in (
            (False, group, layout.tensor),
            (True, expert_group, layout.expert_shards),
        ):
            owned = [product for product in products if product.is_distributed == is_distributed]
            if owned:
                muon_messages, newton_schulz_s = self._muon_update(layout, owned, replicas, shards)
                sent, seconds = sent + muon_messages, seconds + newton_schulz_s
        return sent, seconds

    def _replica_traffic(
        self, layout: Layout, group: Group, num_parameters: int, state: State, backward_s: float
    ) -> Traffic:
        """Return the traffic per step for parameters that all replicas hold."""
        m, stage, is_cpu = layout.num_micro_batches, layout.zero_stage, self.machine.is_cpu
        gradients, weights = num_parameters * state.gradient, num_parameters * state.width
        if stage > 1:
            return self._sharded_traffic(layout, group, gradients, weights, backward_s).repeated(m) + (
                group.all_gather(weights) if stage == GRADIENT_SHARDING_STAGE else Traffic()
            )
        overlap_s = backward_s if layout.overlap_grad_reduce and not is_cpu else 0.0
        stays_sharded = stage == 1 and not is_cpu and (layout.overlap_grad_reduce or layout.pipe > 1)
        reduction = group.reduce_scatter(gradients) if stays_sharded else group.all_reduce(gradients)
        return reduction.hidden_by(overlap_s) + (group.all_gather(weights) if stage else Traffic())

    def _expert_replica_traffic(
        self, layout: Layout, group: Group, num_parameters: int, state: State, backward_s: float
    ) -> Traffic:
        """Return the traffic per step for experts, which only some replicas hold: ``group``."""
        gradients, weights = num_parameters * state.gradient, num_parameters * state.width
        if layout.zero_stage > 1:
            return self._replica_traffic(layout, group, num_parameters, state, backward_s)
        return group.all_reduce(gradients) + (group.all_gather(weights) if layout.zero_stage else Traffic())

    def _sharded_traffic(
        self, layout: Layout, group: Group, gradients: int, weights: int, backward_s: float
    ) -> Traffic:
        """Return the traffic per micro-batch of ZeRO 2 (gradients) and 3 (weights, too).

        Args:
            gradients, weights: bytes.
        """
        overlap_s = 0.0 if self.machine.is_cpu else backward_s
        reduction = group.reduce_scatter(gradients)
        if layout.zero_stage == GRADIENT_SHARDING_STAGE:
            return reduction.hidden_by(overlap_s)
        forward_s = overlap_s / (3 if layout.recompute == "full" else 2)
        backward = (reduction + group.all_gather(weights)).hidden_by(overlap_s)
        return group.all_gather(weights).hidden_by(forward_s) + backward

    def _muon_update(
        self, layout: Layout, products: Sequence[Product], data: Group, shards: int
    ) -> tuple[Traffic, float]:
        """Return the traffic of Muon's update, and the duration of the Newton-Schulz steps in seconds.

        The matrices are divided among ``shards * data.size`` owners. The steps run in bf16. Query, key and value
        count as one matrix, and so do gate and up. Matrices are sent to their owner and back with 2 bytes per element.

        Args:
            data: group of the ranks that hold the same matrices.
            shards: number of consecutive ranks over which a matrix is sharded.
        """
        machine, owners = self.machine, shards * data.size
        dtype = "bf16" if "bf16" in machine.product_flops else layout.dtype
        seconds = 0.0
        for product in products:
            rows, columns = sorted((product.inner, product.columns))
            rate = machine.product_rate(dtype, float(rows * rows * columns) ** (1 / 3))
            seconds += product.count * newton_schulz_flops(rows, columns) / rate / owners
        num_weights = sum(product.weights for product in products)
        tensor = Group.on_machine(machine, shards, 1, layout.world_size)
        num_bytes = 2 * num_weights / owners  # each rank sends as many bytes as it receives
        gathered_bytes = num_bytes if layout.zero_stage else num_bytes * data.size
        to_owner = data.all_gather(num_bytes if layout.zero_stage else 0)
        return to_owner + data.all_gather(gathered_bytes) + tensor.all_gather(num_bytes).repeated(2), seconds

    def _update(self, layout: Layout, num_dense: int, num_expert: int, state: State, matrices: int = 0) -> float:
        """Return the seconds per update: read and write all states, and read the gradients again for the norm."""
        machine, share = self.machine, layout.zero.share(1)
        num_parameters = num_dense / share + num_expert / (max(layout.expert_replicas, 1) if share > 1 else 1)
        moved_bytes = (
            num_parameters * (2 * (state.width + state.optimizer) + 2 * state.gradient)
            - 2 * state.saved * matrices / share
        )
        if not layout.offload_optimizer:
            return moved_bytes / machine.update_bandwidth
        # main params are copied to the device before they are rounded
        copies = num_parameters * 2 * state.gradient / machine.host_bandwidth
        return moved_bytes / machine.host_update_bandwidth + copies

    def _backward_traffic(self, group: Group, work: Work, unit: Seconds, layout: Layout, is_sharded: bool) -> Traffic:
        """Return the tensor-parallel communication in a unit's backward pass.

        All-reduces overlap with the weight-gradient matmuls of column-parallel layers. The repeated all-gather of the
        input overlaps with the input-gradient matmuls of these layers. If the schedule defers weight gradients, or if
        layers are compiled, nothing overlaps, and the input is not gathered again but saved in forward.

        Args:
            is_sharded: activations between the unit's matmuls are split over the tensor ranks.
        """
        is_plain = layout.schedule in SPLIT_SCHEDULES or layout.is_compiled
        overlaps = layout.overlaps_tensor and not self.machine.is_cpu and not is_plain
        overlap_s = unit.column_weight_grads if overlaps else 0.0
        if not is_sharded:
            return sum((group.all_reduce(size) for size in work.backward_reduced_bytes), Traffic()).hidden_by(overlap_s)
        split, unsplit = (
            work.backward_reduced_bytes[: len(work.reduced_bytes)],
            work.backward_reduced_bytes[len(work.reduced_bytes) :],
        )
        gathered = sum((group.all_gather(size) for size in split), Traffic())
        reductions = sum((group.reduce_scatter(size) for size in split), Traffic())
        reductions += sum((group.all_reduce(size) for size in unsplit), Traffic())
        regathered = Traffic() if is_plain else gathered.hidden_by(overlap_s)
        return gathered + regathered + reductions.hidden_by(overlap_s)


def sum_traffic(sent: Sequence[Traffic], unit_ranges: Sequence[tuple[int, int]]) -> Traffic:
    return sum((sent[n] for start, stop in unit_ranges for n in range(start, stop)), Traffic())
