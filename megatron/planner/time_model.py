"""Time of the units of a model on one rank, and of the communication of a step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from megatron.config.newton_schulz import newton_schulz_flops
from megatron.costs.cost import Costs, Product, Work
from megatron.costs.memory import BYTES, Kept, State
from megatron.planner.layout import Layout
from megatron.planner.machine import CUT, HEAD, LAYER, EfficiencyFactor, EfficiencyFactors, Link, Machine, Wire
from tds.schedule import V
from tds.schedule.simulate import SPLITTING

# Time that one rank spends in the units of a model for one micro-batch, without communication.
#
# | part | forward | backward |
# |---|---|---|
# | products (matmuls) | flops / rate(side) | twice as many; the core of fused attention 2.5 times |
# | a pass | bytes saved / memory bandwidth; for the head, bytes of the logits | the same |
# | operations | overhead per operation | twice as many |
# | gradients of weights | | accumulated over micro-batches: 10 bytes per parameter in 16 bits, 12 bytes in 32 bits |
#
# The machine's ``EfficiencyFactors`` multiply matmuls and passes, with separate factors for layers that are split over
# tensor ranks. Recomputation adds a forward pass of the layers, or of the attention cores, to the backward pass.

CORE_BACKWARD = 2.5
"""Ratio of backward to forward time of a fused attention core: backward recomputes the scores (5 matmuls for 2)."""


@dataclass(frozen=True)
class Seconds:
    """Times of one or several units, in seconds.

    Args:
        backward: includes ``again``.
        again: recomputation.
        weights: part of ``backward``: matmuls for the gradients of weights.
        columns: part of ``weights`` in column-parallel layers, which can overlap with their all-reduce.
    """

    forward: float = 0.0
    backward: float = 0.0
    again: float = 0.0
    weights: float = 0.0
    columns: float = 0.0

    @property
    def whole(self) -> float:
        return self.forward + self.backward


@dataclass(frozen=True)
class Parts:
    """Times of the operations of a unit in seconds, before efficiency factors.

    Args:
        products: matmuls with weights in forward.
        columns: part of ``products`` in column-parallel layers.
        core, core_back: attention core in forward and in backward.
        passed: one pass over the saved activations.
        scored: one pass over the attention scores.
        started: overhead of the operations of a forward pass.
        adding: accumulation of the gradients of weights.
        beside, beside_back: time of passes in forward and backward to which no factor applies.
        cores: one pass over the activations that attention saves between its matmuls.
        is_again: full recomputation runs the unit again.
    """

    products: float
    columns: float
    core: float
    core_back: float
    passed: float
    scored: float
    started: float
    adding: float
    beside: float = 0.0
    beside_back: float = 0.0
    cores: float = 0.0
    is_again: bool = False

    def forward(self, efficiency: EfficiencyFactor) -> float:
        """Return the time of a forward pass in seconds."""
        return efficiency.of(self.forward_parts) + self.forward_rest

    def backward(self, efficiency: EfficiencyFactor) -> float:
        """Return the time of a backward pass in seconds, without recomputation."""
        return efficiency.of(self.backward_parts) + self.backward_rest

    @property
    def forward_parts(self) -> tuple[float, float, float]:
        """(Time of the matmuls, of a pass, of a pass over the scores), to which the efficiency factors apply."""
        return self.products + self.core, self.passed, self.scored

    @property
    def backward_parts(self) -> tuple[float, float, float]:
        return 2 * self.products + self.core_back, self.passed, self.scored

    @property
    def forward_rest(self) -> float:
        """Time to which no factor applies."""
        return self.started + self.beside

    @property
    def backward_rest(self) -> float:
        return 2 * self.started + self.adding + self.beside_back


class Clock:
    """Computes the times of a model's units on ``machine``; the layout is an argument of each method."""

    def __init__(self, costs: Costs, machine: Machine, family: str) -> None:
        self._costs, self._machine, self._family = costs, machine, family
        self._kinds = [f"{family} {_kind(name)}" for name in costs.unit_names]

    def units(self, layout: Layout) -> list[Seconds]:
        """Return the time of each unit for a micro-batch."""
        cache: dict[int, Seconds] = {}  # equal layers share one object
        seconds = []
        for idx, parts in enumerate(self.parts(layout)):
            if id(parts) not in cache:
                cache[id(parts)] = self._unit(idx, parts, layout)
            seconds.append(cache[id(parts)])
        return seconds

    def parts(self, layout: Layout) -> list[Parts]:
        """Return the times of the operations of each unit; equal layers share one object."""
        b, t, width = layout.micro_batch_size, layout.tensor, BYTES[layout.dtype]
        works = self._costs.unit_work(b, t, width)
        kept = self._costs.unit_kept(b, t, width, layout.sequence)
        added = self._costs.unit_parameters(t)
        cache: dict[tuple[int, Kept, int], Parts] = {}
        parts = []
        for idx, (work, kept_bytes, parameters) in enumerate(zip(works, kept, added, strict=True)):
            key = id(work), kept_bytes, parameters
            if key not in cache:
                is_head = idx == len(works) - 1
                logits = self._costs.logit_bytes(b, t, width) if is_head else None
                cache[key] = self._parts(work, kept_bytes, parameters, logits, layout)
            parts.append(cache[key])
        return parts

    def factors(self, unit: int, layout: Layout) -> EfficiencyFactors:
        """Return the efficiency factors of unit ``unit`` (an index) in ``layout``."""
        unit_type, default = self._kinds[unit], HEAD if unit == len(self._kinds) - 1 else LAYER
        unsplit = self._machine.efficiency(layout.dtype, unit_type, default)
        return self._machine.efficiency(layout.dtype, unit_type + CUT, unsplit) if layout.tensor > 1 else unsplit

    def _parts(self, work: Work, kept: Kept, parameters: int, logits: int | None, layout: Layout) -> Parts:
        machine = self._machine
        products, core = (self._products(subset, layout.dtype) for subset in (work.products, work.core))
        one = kept.full / machine.memory_bandwidth
        is_head = logits is not None
        return Parts(
            products=products,
            columns=self._products([one for one in work.products if one.is_column], layout.dtype),
            core=core,
            core_back=(2 if kept.core else CORE_BACKWARD) * core,
            passed=(logits or 0) / machine.memory_bandwidth if is_head else one,
            scored=_scores(work) * BYTES[layout.dtype] / machine.memory_bandwidth,
            started=work.operations * machine.overhead_s,
            adding=(BYTES[layout.dtype] + 8) * parameters / machine.memory_bandwidth,
            beside=LAYER.forward.passes * one * is_head,
            beside_back=LAYER.backward.passes * one * is_head,
            cores=kept.core / machine.memory_bandwidth,
            is_again=bool(kept.input),
        )

    def _unit(self, number: int, parts: Parts, layout: Layout) -> Seconds:
        factors = self.factors(number, layout)
        forward, backward = parts.forward(factors.forward), parts.backward(factors.backward)
        again = 0.0
        if layout.recompute == "full" and parts.is_again:
            again = forward
        elif layout.recompute == "selective" and parts.is_again:
            again = factors.forward.of((parts.core, parts.cores, parts.scored))
        factor = factors.backward.products
        return Seconds(forward, backward + again, again, factor * parts.products, factor * parts.columns)

    def _products(self, products: Sequence[Product], dtype: str) -> float:
        return sum(product.flops / self._machine.product_rate(dtype, product.side) for product in products)


def _kind(unit: str) -> str:
    """Return the type of a unit: its name without a layer's number."""
    return unit.rsplit(" ", 1)[0] if unit.split()[-1].isdigit() else unit


def _scores(work: Work) -> float:
    """Return the number of attention scores of a unit: the outputs of the first matmul of each pair in the core."""
    return sum(product.rows * product.columns * product.number for product in work.core[::2])


# Communication of a step: bytes sent by a rank, time, and the part that overlaps with other work.
#
# | type | per | a rank of n sends |
# |---|---|---|
# | tensor | all-reduce of activations of X bytes over t ranks | 2 (t - 1) / t X |
# | ... with sequence parallelism | instead of an all-reduce: in forward an all-gather and a reduce-scatter; in backward two all-gathers (of the output's gradient, and of the input again, which zb-h1 and compiled layers save) and a reduce-scatter | 2 (t - 1) / t X; 3 (t - 1) / t X |  # noqa: E501
# | context | layer and micro-batch: keys, values of X bytes gathered twice, gradients scattered | 3 (c - 1) / c X |
# | ... a2a | queries, keys, values, context of X bytes in forward and backward; again if recomputed | 2 (c - 1) / c^2 X |  # noqa: E501
# | expert | layer with experts and micro-batch: dispatch and combine rows of X bytes, in forward and in backward; again if recomputed | 4 (e - 1) / e X |  # noqa: E501
# | pipeline | boundary and micro-batch, each way | s b h numbers; in a T5's decoder stages also the encoder's output |
# | data | all-reduce of gradients over d replicas: ZeRO 0, on CPUs also 1 | 2 (d - 1) / d x 4 bytes per parameter |
# | ... ZeRO 1 on GPUs, instead of it | reduce-scatter | (d - 1) / d x 4 |
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
    """Communication of one rank: bytes sent, duration, and the part of the duration that overlaps with other work."""

    bytes: float = 0.0
    seconds: float = 0.0
    hidden_s: float = 0.0

    @property
    def exposed_s(self) -> float:
        return self.seconds - self.hidden_s

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(self.bytes + other.bytes, self.seconds + other.seconds, self.hidden_s + other.hidden_s)

    def times(self, number: float) -> Traffic:
        """Return the traffic of ``number`` repetitions."""
        return Traffic(number * self.bytes, number * self.seconds, number * self.hidden_s)

    def behind(self, seconds: float) -> Traffic:
        """Return the same traffic with up to ``seconds`` of it hidden by other work."""
        return Traffic(self.bytes, self.seconds, min(self.seconds, max(seconds, 0.0)))


@dataclass(frozen=True)
class Group:
    """A group of ``size`` ranks, whose global ranks differ by ``stride``, and the link between the ranks."""

    size: int
    link: Link
    speed: float = 1.0
    most: Link | None = None  # upper bound: a group over several nodes is not faster than a group within a node

    @classmethod
    def of(cls, machine: Machine, size: int, stride: int, world: int) -> Group:
        """Return the slowest group of ``size`` ranks with ``stride`` among ``world`` ranks on ``machine``."""
        if world <= machine.devices_per_node or machine.devices_per_node % (size * stride) == 0:
            return cls(size, machine.intra)
        return cls(size, machine.inter, max(machine.devices_per_node / stride, 1.0), machine.intra)

    def summed(self, num_bytes: float) -> Traffic:
        """Return the traffic of an all-reduce of ``num_bytes``."""
        return self._around("all_reduce", 2 * num_bytes)

    def gathered(self, num_bytes: float) -> Traffic:
        """Return the traffic of an all-gather with a result of ``num_bytes``."""
        return self._around("gather", num_bytes)

    def scattered(self, num_bytes: float) -> Traffic:
        """Return the traffic of a reduce-scatter with an input of ``num_bytes``."""
        return self._around("scatter", num_bytes)

    def sent(self, num_bytes: float) -> Traffic:
        """Return the traffic of a point-to-point message between neighbours in the group."""
        wire: Wire = self.link.send
        return Traffic(num_bytes, wire.latency_s + num_bytes / self._bandwidth("send")) if self.size > 1 else Traffic()

    def _around(self, kind: str, num_bytes: float) -> Traffic:
        if self.size == 1:
            return Traffic()
        num_sent = (self.size - 1) / self.size * num_bytes
        wire: Wire = getattr(self.link, kind)
        return Traffic(num_sent, wire.latency_s * math.log2(self.size) + num_sent / self._bandwidth(kind))

    def _bandwidth(self, kind: str) -> float:
        wire: Wire = getattr(self.link, kind)
        limit = math.inf if self.most is None else getattr(self.most, kind).bandwidth
        return float(min(wire.bandwidth * self.speed, limit))


# Communication of a layout in a step (within units, over stage boundaries, of gradients), and the update.
#
# The table above lists the types. On a CPU, communication uses the cores that compute, so nothing overlaps.


class Messages:
    """Computes the communication of layouts of one model on ``machine``."""

    def __init__(self, costs: Costs, machine: Machine) -> None:
        self.costs, self.machine = costs, machine

    def _along(self, axis: str, layout: Layout) -> Group:
        """Return the group of ranks along one axis of the grid."""
        return Group.of(self.machine, getattr(layout, axis), layout.stride(axis), layout.world_size)

    def sums(self, layout: Layout, units: Sequence[Seconds]) -> list[Traffic]:
        """Return the tensor-parallel communication of each unit for a micro-batch."""
        return [forward + backward for forward, backward in self.ways(layout, units)]

    def context(self, layout: Layout) -> Traffic:
        """Return the context-parallel communication of one layer for a micro-batch. It never overlaps."""
        group = self._along("context", layout)
        sizes = self.costs.context_messages(layout.micro_batch_size, layout.tensor, BYTES[layout.dtype])
        if layout.cuts_heads:
            times = 2 if layout.recompute == "none" else 3
            return sum((group.gathered(size / layout.context) for size in sizes), Traffic()).times(times)
        twice = sum((group.gathered(size) for size in sizes), Traffic()).times(2)
        return twice + sum((group.scattered(size) for size in sizes), Traffic())

    def experts(self, layout: Layout) -> list[Traffic]:
        """Return the expert-parallel communication of each unit for a micro-batch. It never overlaps.

        The experts are assumed to be evenly loaded. The few bytes of row counts are left out.
        """
        group = Group.of(self.machine, layout.expert, layout.stride("context"), layout.world_size)
        sizes = self.costs.expert_messages(layout.micro_batch_size, layout.tensor, BYTES[layout.dtype])
        times = 3 if layout.recompute == "full" else 2
        return [sum((group.gathered(size) for size in unit_sizes), Traffic()).times(times) for unit_sizes in sizes]

    def ways(self, layout: Layout, units: Sequence[Seconds]) -> list[tuple[Traffic, Traffic]]:
        """Return the tensor-parallel communication of each unit as (forward, backward)."""
        group = self._along("tensor", layout)
        works = self.costs.unit_work(layout.micro_batch_size, layout.tensor, BYTES[layout.dtype])
        again = 2 if layout.recompute == "full" else 1
        traffic = []
        cache: dict[int, tuple[Traffic, Traffic]] = {}
        for work, unit in zip(works, units, strict=True):
            if id(work) not in cache:
                is_cut, times = layout.sequence_parallel and bool(work.core), again if work.core else 1
                collectives = (group.gathered, group.scattered) if is_cut else (group.summed,)
                forward = sum(
                    (collective(size).times(times) for size in work.sums for collective in collectives), Traffic()
                )
                cache[id(work)] = forward, self._back(group, work, unit, layout, is_cut)
            traffic.append(cache[id(work)])
        return traffic

    def across(self, layout: Layout, bounds: Sequence[int], piece_s: float) -> tuple[Traffic, float]:
        """Return the traffic of the busiest stage boundary in a step, and the seconds that stages wait for messages.

        The first micro-batch waits at each boundary, in both directions, and with placement V in both chunks. Other
        micro-batches only wait if their message takes longer than half the time of a piece.

        Args:
            piece_s: seconds of the fastest piece for a micro-batch.
        """
        if layout.pipe == 1:
            return Traffic(), 0.0
        width, placement = BYTES[layout.dtype], layout.placement
        group = self._along("pipe", layout)
        sizes = [
            self.costs.boundary_bytes(bound, layout.micro_batch_size, width) / layout.sequence
            for piece, bound in enumerate(bounds[1:-1])
            if placement.stage_of(piece) != placement.stage_of(piece + 1)
        ]
        m, p, c, is_v = layout.num_micro_batches, layout.pipe, layout.chunks, placement.kind == V
        message = group.sent(max(sizes))
        num_messages = 2 * m * (c if c == 1 or is_v else (c * p - 1) / p)
        slow = max(message.seconds - piece_s / 2, 0.0)
        waits = 2 * (p - 1) * (c if is_v else 1) * message.seconds + 2 * m * c * slow
        all_messages = message.times(num_messages)
        return all_messages.behind(all_messages.seconds - waits), waits

    def summed(self, layout: Layout, bounds: Sequence[int], backward_s: float) -> tuple[Traffic, float]:
        """Return the data-parallel traffic of a step, and the seconds of the update.

        Args:
            backward_s: seconds of a backward pass, with which gradient communication can overlap.
        """
        machine, state = self.machine, State.of(layout.dtype, layout.optimizer, layout.num_bf16_states)
        placement_args = layout.pipe, layout.placement.kind
        of_stages = self.costs.stage_parameters(bounds, layout.tensor, *placement_args)
        fullest = of_stages.index(max(of_stages))
        num_expert = self.costs.stage_apart(bounds, layout.tensor, *placement_args)[fullest]
        num_dense = of_stages[fullest] - num_expert
        group = Group.of(machine, layout.data * layout.context, layout.stride("context"), layout.world_size)
        m, stage = layout.num_micro_batches, layout.zero_stage
        hiding = 0.0 if machine.is_cpu else backward_s
        gradients, weights = num_dense * state.gradient, num_dense * state.width
        leaves_parts = stage == 1 and not machine.is_cpu and (layout.overlap_grad_reduce or layout.pipe > 1)
        if leaves_parts:
            sent = group.scattered(gradients).behind(hiding if layout.overlap_grad_reduce else 0.0)
        elif stage < 2:
            sent = group.summed(gradients).behind(hiding if layout.overlap_grad_reduce else 0.0)
        elif stage == 2:
            sent = group.scattered(gradients).behind(hiding).times(m) + group.gathered(weights)
        else:
            forward_s = hiding / (3 if layout.recompute == "full" else 2)
            backward = (group.scattered(gradients) + group.gathered(weights)).behind(hiding)
            sent = (group.gathered(weights).behind(forward_s) + backward).times(m)
        if stage == 1:
            sent += group.gathered(weights)
        own = Group.of(machine, layout.expert_replicas, layout.stride("context") * layout.expert, layout.world_size)
        if num_expert:
            sent += own.summed(num_expert * state.gradient)
            sent += own.gathered(num_expert * state.width) if stage == 1 else Traffic()
        if layout.optimizer != "muon":
            return sent, self._update(layout, num_dense, num_expert, state)
        matrices_of_stages = self.costs.stage_matrices(bounds, layout.pipe, placement=layout.placement.kind)
        products = max(matrices_of_stages, key=lambda own: sum(one.weights for one in own))
        matrices = sum(one.weights for one in products) // layout.tensor
        muon_messages, seconds = self._orthogonalised(layout, products, own)
        return sent + muon_messages, seconds + self._update(layout, num_dense, num_expert, state, matrices)

    def _orthogonalised(self, layout: Layout, products: Sequence[Product], data: Group) -> tuple[Traffic, float]:
        """Return the traffic of Muon's update, and the seconds of its Newton-Schulz steps.

        The matrices are divided among ``layout.tensor * data.size`` owners, where ``data`` is the group of ranks with
        the same experts. The steps run in bf16. Query, key and value count as one matrix, and so do gate and up.
        Matrices are sent to their owner and back with 2 bytes per element.
        """
        machine, owners = self.machine, layout.tensor * data.size
        dtype = "bf16" if "bf16" in machine.product_flops else layout.dtype
        seconds = 0.0
        for product in products:
            rows, columns = sorted((product.inner, product.columns))
            rate = machine.product_rate(dtype, float(rows * rows * columns) ** (1 / 3))
            seconds += product.number * newton_schulz_flops(rows, columns) / rate / owners
        num_weights = sum(product.weights for product in products)
        tensor = self._along("tensor", layout)
        num_bytes = 2 * num_weights / owners  # each rank sends as many bytes as it receives
        gathered_bytes = num_bytes if layout.zero_stage else num_bytes * data.size
        to_owner = data.gathered(num_bytes if layout.zero_stage else 0)
        return to_owner + data.gathered(gathered_bytes) + tensor.gathered(num_bytes).times(2), seconds

    def _update(self, layout: Layout, held: int, apart: int, state: State, matrices: int = 0) -> float:
        """Return the seconds of an update: read and write all states, and read the gradients again for their norm."""
        machine, share = self.machine, layout.zero.share(1)
        num_parameters = held / share + apart * layout.expert / max(share, layout.expert)
        moved_bytes = (
            num_parameters * (2 * (state.width + state.optimizer) + 2 * state.gradient)
            - 2 * state.saved * matrices / share
        )
        if not layout.offload_optimizer:
            return moved_bytes / machine.update_bandwidth
        # main params are copied to the device before they are rounded
        copies = num_parameters * 2 * state.gradient / machine.host_bandwidth
        return moved_bytes / machine.host_update_bandwidth + copies

    def _back(self, group: Group, work: Work, unit: Seconds, layout: Layout, is_cut: bool) -> Traffic:
        """Return the tensor-parallel communication of a unit's backward pass.

        All-reduces overlap with the weight-gradient matmuls of column-parallel layers. The repeated all-gather of the
        input overlaps with the input-gradient matmuls of these layers. If the schedule defers weight gradients, or if
        layers are compiled, nothing overlaps, and the input is not gathered again but saved in forward.

        Args:
            is_cut: activations between the unit's matmuls are split over the tensor ranks.
        """
        is_plain = layout.schedule in SPLITTING or layout.is_compiled
        hides = layout.overlaps_tensor and not self.machine.is_cpu and not is_plain
        overlap_s = unit.columns if hides else 0.0
        if not is_cut:
            return sum((group.summed(size) for size in work.back), Traffic()).behind(overlap_s)
        split, unsplit = work.back[: len(work.sums)], work.back[len(work.sums) :]
        gathered = sum((group.gathered(size) for size in split), Traffic())
        sums = sum((group.scattered(size) for size in split), Traffic())
        sums += sum((group.summed(size) for size in unsplit), Traffic())
        again = Traffic() if is_plain else gathered.behind(overlap_s)
        return gathered + again + sums.behind(overlap_s)


def total(sent: Sequence[Traffic], pieces: Sequence[tuple[int, int]]) -> Traffic:
    return sum((sent[n] for start, stop in pieces for n in range(start, stop)), Traffic())
