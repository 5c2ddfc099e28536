"""Seconds of a unit on one rank, and of the messages of a step."""

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

# Seconds that one rank spends in the units of a model on one micro-batch, messages apart.
#
# | part | forward | backward |
# |---|---|---|
# | products | flops / rate(side) | twice as many; the core of fused attention 2.5 times |
# | a pass | bytes kept / bandwidth of memory; of the head the bytes of the logits | the same |
# | operations | each has its overhead | twice as many |
# | gradients of weights | | read, and added to the sum of the micro-batches: 10 bytes in 16 bits, 12 in 32 |
#
# How often products and passes count says the machine's ``EfficiencyFactors``, for layers that are cut over tensor
# ranks their own. Recomputation adds a forward to the backward: of the layers, or of the cores of attention.

CORE_BACKWARD = 2.5
"""A fused kernel makes the scores once more: five products in place of two."""


@dataclass(frozen=True)
class Seconds:
    """Of one unit or of several; of ``backward``: ``again`` what is recomputed, ``weights`` products for weights.

    Args:
        columns: of ``weights``, those of layers that sum the gradient of their input over the tensor ranks.
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
    """What the operations of a unit take by themselves, in seconds.

    Args:
        products: with weights, in forward; ``columns`` those of column layers.
        core, core_back: of attention, in forward and in backward.
        passed: one pass over what is kept, ``scored`` one over the scores of attention.
        started: the overhead of the operations of a forward.
        adding: gradients of weights.
        beside, beside_back: passes that no efficiency counts.
        cores: one pass over what attention keeps between its products.
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
        """Return the seconds of a forward."""
        return efficiency.of(self.forward_parts) + self.forward_rest

    def backward(self, efficiency: EfficiencyFactor) -> float:
        """Return the seconds of a backward, without what is recomputed."""
        return efficiency.of(self.backward_parts) + self.backward_rest

    @property
    def forward_parts(self) -> tuple[float, float, float]:
        """Seconds of products, of a pass and of one over the scores, which factors count."""
        return self.products + self.core, self.passed, self.scored

    @property
    def backward_parts(self) -> tuple[float, float, float]:
        return 2 * self.products + self.core_back, self.passed, self.scored

    @property
    def forward_rest(self) -> float:
        """Seconds that no efficiency changes."""
        return self.started + self.beside

    @property
    def backward_rest(self) -> float:
        return 2 * self.started + self.adding + self.beside_back


class Clock:
    """Tells how long units take on ``machine`` in layouts of one model of ``family``."""

    def __init__(self, costs: Costs, machine: Machine, family: str) -> None:
        self._costs, self._machine, self._family = costs, machine, family
        self._kinds = [f"{family} {_kind(name)}" for name in costs.unit_names]

    def units(self, layout: Layout) -> list[Seconds]:
        """Return the seconds of each unit for a micro-batch."""
        known: dict[int, Seconds] = {}  # layers are alike
        found = []
        for number, parts in enumerate(self.parts(layout)):
            if id(parts) not in known:
                known[id(parts)] = self._unit(number, parts, layout)
            found.append(known[id(parts)])
        return found

    def parts(self, layout: Layout) -> list[Parts]:
        """Return what the operations of each unit add up to; of equal layers one object."""
        b, t, width = layout.micro_batch_size, layout.tensor, BYTES[layout.dtype]
        works = self._costs.unit_work(b, t, width)
        kept = self._costs.unit_kept(b, t, width, layout.sequence)
        added = self._costs.unit_parameters(t)
        known: dict[tuple[int, Kept, int], Parts] = {}
        found = []
        for number, (work, own, parameters) in enumerate(zip(works, kept, added, strict=True)):
            key = id(work), own, parameters
            if key not in known:
                is_head = number == len(works) - 1
                logits = self._costs.logit_bytes(b, t, width) if is_head else None
                known[key] = self._parts(work, own, parameters, logits, layout)
            found.append(known[key])
        return found

    def factors(self, unit: int, layout: Layout) -> EfficiencyFactors:
        """Return how often products and passes of a unit count."""
        kind, closed = self._kinds[unit], HEAD if unit == len(self._kinds) - 1 else LAYER
        whole = self._machine.efficiency(layout.dtype, kind, closed)
        return self._machine.efficiency(layout.dtype, kind + CUT, whole) if layout.tensor > 1 else whole

    def _parts(self, work: Work, kept: Kept, parameters: int, logits: int | None, layout: Layout) -> Parts:
        machine = self._machine
        products, core = (self._products(some, layout.dtype) for some in (work.products, work.core))
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
        return sum(one.flops / self._machine.product_rate(dtype, one.side) for one in products)


def _kind(unit: str) -> str:
    """Return what units of that name are, without a layer's number."""
    return unit.rsplit(" ", 1)[0] if unit.split()[-1].isdigit() else unit


def _scores(work: Work) -> float:
    """Return the scores of a unit's attentions: of two products each makes one."""
    return sum(one.rows * one.columns * one.number for one in work.core[::2])


# Messages of a step: their bytes on a rank, their seconds, and how many of these other work hides.
#
# | kind | for each | a rank of n sends |
# |---|---|---|
# | tensor | sum of activations of X bytes over t ranks | 2 (t - 1) / t X |
# | ... with sequence parallelism | in place of a sum of forward an all-gather and a reduce-scatter; of backward two all-gathers (of the output's gradient, and of the input once more, which zb-h1 and compiled layers keep) and a reduce-scatter | 2 (t - 1) / t X; 3 (t - 1) / t X |  # noqa: E501
# | context | layer and micro-batch: keys, values of X bytes gathered twice, gradients scattered | 3 (c - 1) / c X |
# | ... a2a | queries, keys, values and context of X bytes there and back, recomputed once more | 2 (c - 1) / c^2 X |
# | expert | layer with experts and micro-batch: rows of X bytes to the experts, what became of them back; both in backward, recomputed both once more | 4 (e - 1) / e X |  # noqa: E501
# | pipeline | boundary and micro-batch, each way | s b h numbers; from the seam of a T5 on those of both sides |
# | data | sum of gradients over d replicas, ZeRO 0, and 1 on CPUs | 2 (d - 1) / d x 4 bytes of a parameter |
# | ... ZeRO 1 on GPUs, in place of it | each replica's part of the sum | (d - 1) / d x 4 |
# | ... of experts that e ranks share out | the sum over d / e replicas, behind the last backward; not by parts | 2 (d / e - 1) / (d / e) x 4 |  # noqa: E501
# | ... ZeRO 1 and 2 also | weights after the update | (d - 1) / d x a weight |
# | ... ZeRO 2 | micro-batch, in place of the sum | (d - 1) / d x 4 |
# | ... ZeRO 3 | micro-batch: the same, and weights gathered twice, a layer ahead | (d - 1) / d x (4 + 2 x a weight) |
#
# Backward starts the sum of a column layer's gradient ahead of that layer's product for weights, and joins its input
# beside the product for the input. All other messages of tensor ranks are waited for, those around the head too.
#
# A group whose ranks lie in one node uses the node's links; one that leaves it goes as fast as the network cards of its
# members in a node together, for as many groups share these. The tensor axis runs fastest, then the data axis.
#
# Sources: Narayanan et al. 2021, section 3; Rajbhandari et al. 2020, "ZeRO", section 7.


@dataclass(frozen=True)
class Traffic:
    """Bytes that a rank sends in a step, the seconds that takes, and those of them behind other work."""

    bytes: float = 0.0
    seconds: float = 0.0
    hidden_s: float = 0.0

    @property
    def exposed_s(self) -> float:
        return self.seconds - self.hidden_s

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(self.bytes + other.bytes, self.seconds + other.seconds, self.hidden_s + other.hidden_s)

    def times(self, number: float) -> Traffic:
        """Return the traffic of so many of these."""
        return Traffic(number * self.bytes, number * self.seconds, number * self.hidden_s)

    def behind(self, seconds: float) -> Traffic:
        """Return the same traffic while other work lasts so long."""
        return Traffic(self.bytes, self.seconds, min(self.seconds, max(seconds, 0.0)))


@dataclass(frozen=True)
class Group:
    """Ranks that are ``stride`` apart, ``size`` of them, and how they reach each other."""

    size: int
    link: Link
    speed: float = 1.0
    most: Link | None = None  # a group that leaves its nodes is no faster than within one

    @classmethod
    def of(cls, machine: Machine, size: int, stride: int, world: int) -> Group:
        """Return the group of ``size`` ranks of ``machine`` in steps of ``stride``; of all such groups the slowest."""
        if world <= machine.devices_per_node or machine.devices_per_node % (size * stride) == 0:
            return cls(size, machine.intra)
        return cls(size, machine.inter, max(machine.devices_per_node / stride, 1.0), machine.intra)

    def summed(self, num_bytes: float) -> Traffic:
        """Return an all-reduce of so many bytes."""
        return self._around("all_reduce", 2 * num_bytes)

    def gathered(self, num_bytes: float) -> Traffic:
        """Return an all-gather to so many bytes."""
        return self._around("gather", num_bytes)

    def scattered(self, num_bytes: float) -> Traffic:
        """Return a reduce-scatter of so many bytes."""
        return self._around("scatter", num_bytes)

    def sent(self, num_bytes: float) -> Traffic:
        """Return a message from one rank of the group to the next."""
        wire: Wire = self.link.send
        return Traffic(num_bytes, wire.latency_s + num_bytes / self._bandwidth("send")) if self.size > 1 else Traffic()

    def _around(self, kind: str, num_bytes: float) -> Traffic:
        if self.size == 1:
            return Traffic()
        own = (self.size - 1) / self.size * num_bytes
        wire: Wire = getattr(self.link, kind)
        return Traffic(own, wire.latency_s * math.log2(self.size) + own / self._bandwidth(kind))

    def _bandwidth(self, kind: str) -> float:
        own: Wire = getattr(self.link, kind)
        limit = math.inf if self.most is None else getattr(self.most, kind).bandwidth
        return float(min(own.bandwidth * self.speed, limit))


# What ranks of a layout send each other in a step, and what follows it: sums of units, boundaries, gradients, update.
#
# ``megatron.planner.traffic`` has the table of messages. On a CPU whatever is sent takes the time of the cores that
# compute, so that nothing hides it.


class Messages:
    """Tells what layouts of one model send on ``machine``."""

    def __init__(self, costs: Costs, machine: Machine) -> None:
        self.costs, self.machine = costs, machine

    def _along(self, axis: str, layout: Layout) -> Group:
        """Return the group of ranks along one axis of the grid."""
        return Group.of(self.machine, getattr(layout, axis), layout.stride(axis), layout.world_size)

    def sums(self, layout: Layout, units: Sequence[Seconds]) -> list[Traffic]:
        """Return the messages between tensor ranks of each unit for a micro-batch."""
        return [forward + backward for forward, backward in self.ways(layout, units)]

    def context(self, layout: Layout) -> Traffic:
        """Return the messages over the context ranks of one layer, for a micro-batch; all are waited for."""
        group = self._along("context", layout)
        sizes = self.costs.context_messages(layout.micro_batch_size, layout.tensor, BYTES[layout.dtype])
        if layout.cuts_heads:
            times = 2 if layout.recompute == "none" else 3
            return sum((group.gathered(size / layout.context) for size in sizes), Traffic()).times(times)
        twice = sum((group.gathered(size) for size in sizes), Traffic()).times(2)
        return twice + sum((group.scattered(size) for size in sizes), Traffic())

    def experts(self, layout: Layout) -> list[Traffic]:
        """Return the messages of each unit between ranks that share out experts, for a micro-batch; all are waited for.

        Experts have an even load. Counts of rows, some bytes, are left out.
        """
        group = Group.of(self.machine, layout.expert, layout.stride("context"), layout.world_size)
        sizes = self.costs.expert_messages(layout.micro_batch_size, layout.tensor, BYTES[layout.dtype])
        times = 3 if layout.recompute == "full" else 2
        return [sum((group.gathered(size) for size in own), Traffic()).times(times) for own in sizes]

    def ways(self, layout: Layout, units: Sequence[Seconds]) -> list[tuple[Traffic, Traffic]]:
        """Return the messages between tensor ranks of each unit's forward and of its backward."""
        group = self._along("tensor", layout)
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

        The first micro-batch waits at each boundary, there and back, in a V of both chunks; others while their message
        takes longer than a piece.
        """
        if layout.pipe == 1:
            return Traffic(), 0.0
        width, lie = BYTES[layout.dtype], layout.placement
        group = self._along("pipe", layout)
        sizes = [
            self.costs.boundary_bytes(bound, layout.micro_batch_size, width) / layout.sequence
            for piece, bound in enumerate(bounds[1:-1])
            if lie.stage_of(piece) != lie.stage_of(piece + 1)
        ]
        m, p, c, is_v = layout.num_micro_batches, layout.pipe, layout.chunks, lie.kind == V
        one = group.sent(max(sizes))
        number = 2 * m * (c if c == 1 or is_v else (c * p - 1) / p)
        slow = max(one.seconds - piece_s / 2, 0.0)
        waits = 2 * (p - 1) * (c if is_v else 1) * one.seconds + 2 * m * c * slow
        whole = one.times(number)
        return whole.behind(whole.seconds - waits), waits

    def summed(self, layout: Layout, bounds: Sequence[int], backward_s: float) -> tuple[Traffic, float]:
        """Return what replicas send in a step, and the seconds of the update."""
        machine, state = self.machine, State.of(layout.dtype, layout.optimizer, layout.num_bf16_states)
        lie = layout.pipe, layout.placement.kind
        of_stages = self.costs.stage_parameters(bounds, layout.tensor, *lie)
        fullest = of_stages.index(max(of_stages))
        apart = self.costs.stage_apart(bounds, layout.tensor, *lie)[fullest]
        held = of_stages[fullest] - apart
        group = Group.of(machine, layout.data * layout.context, layout.stride("context"), layout.world_size)
        m, stage = layout.num_micro_batches, layout.zero_stage
        hiding = 0.0 if machine.is_cpu else backward_s
        gradients, weights = held * state.gradient, held * state.width
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
        if apart:
            sent += own.summed(apart * state.gradient)
            sent += own.gathered(apart * state.width) if stage == 1 else Traffic()
        if layout.optimizer != "muon":
            return sent, self._update(layout, held, apart, state)
        every = self.costs.stage_matrices(bounds, layout.pipe, placement=layout.placement.kind)
        products = max(every, key=lambda own: sum(one.weights for one in own))
        matrices = sum(one.weights for one in products) // layout.tensor
        beside, seconds = self._orthogonalised(layout, products, own)
        return sent + beside, seconds + self._update(layout, held, apart, state, matrices)

    def _orthogonalised(self, layout: Layout, products: Sequence[Product], data: Group) -> tuple[Traffic, float]:
        """Return what Muon's updates send, and the seconds of their Newton-Schulz steps in bf16, shared by all owners.

        Owners are the ranks of ``data``, which have the same experts, times those of the tensor axis.
        Query, key and value count as one matrix, gate and up too; numbers travel to an owner and back in 2 bytes.
        """
        machine, owners = self.machine, layout.tensor * data.size
        dtype = "bf16" if "bf16" in machine.product_flops else layout.dtype
        seconds = 0.0
        for one in products:
            rows, columns = sorted((one.inner, one.columns))
            rate = machine.product_rate(dtype, float(rows * rows * columns) ** (1 / 3))
            seconds += one.number * newton_schulz_flops(rows, columns) / rate / owners
        number = sum(one.weights for one in products)
        tensor = self._along("tensor", layout)
        own = 2 * number / owners  # bytes; each rank sends parts of as much as it gets
        back = own if layout.zero_stage else own * data.size
        there = data.gathered(own if layout.zero_stage else 0)
        return there + data.gathered(back) + tensor.gathered(own).times(2), seconds

    def _update(self, layout: Layout, held: int, apart: int, state: State, matrices: int = 0) -> float:
        """Return the seconds of an update: all of a parameter is read and written, and gradients read for the norm."""
        machine, share = self.machine, layout.zero.share(1)
        number = held / share + apart * layout.expert / max(share, layout.expert)
        moved = number * (2 * (state.width + state.optimizer) + 2 * state.gradient) - 2 * state.saved * matrices / share
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
        is_plain = layout.schedule in SPLITTING or layout.is_compiled
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
