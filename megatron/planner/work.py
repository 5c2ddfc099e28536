"""Seconds that one rank spends in the units of a model on one micro-batch, messages apart.

| part | forward | backward |
|---|---|---|
| products | flops / rate(side) | twice as many; the core of fused attention 2.5 times |
| a pass | bytes kept / bandwidth of memory; of the head the bytes of the logits | the same |
| operations | each has its overhead | twice as many |
| gradients of weights | | read, and added to the sum of the micro-batches: 10 bytes in 16 bits, 12 in 32 |

How often products and passes count says the machine's ``Tempos``, for layers that are cut over tensor ranks their own.
Recomputation adds a forward to the backward: of the layers, or of the cores of attention.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron.cost.costs import Costs
from megatron.cost.memory import BYTES
from megatron.cost.waiting import Kept
from megatron.cost.work import Product, Work
from megatron.planner.layout import Layout
from megatron.planner.machine import Machine
from megatron.planner.tempo import CUT, HEAD, LAYER, Tempo, Tempos

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
        beside, beside_back: passes that no tempo counts.
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

    def forward(self, tempo: Tempo) -> float:
        """Return the seconds of a forward."""
        return tempo.of(self.forward_parts) + self.forward_rest

    def backward(self, tempo: Tempo) -> float:
        """Return the seconds of a backward, without what is recomputed."""
        return tempo.of(self.backward_parts) + self.backward_rest

    @property
    def forward_parts(self) -> tuple[float, float, float]:
        """Seconds of products, of a pass and of one over the scores, which tempos count."""
        return self.products + self.core, self.passed, self.scored

    @property
    def backward_parts(self) -> tuple[float, float, float]:
        return 2 * self.products + self.core_back, self.passed, self.scored

    @property
    def forward_rest(self) -> float:
        """Seconds that no tempo changes."""
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

    def tempos(self, unit: int, layout: Layout) -> Tempos:
        """Return how often products and passes of a unit count."""
        kind, closed = self._kinds[unit], HEAD if unit == len(self._kinds) - 1 else LAYER
        whole = self._machine.tempo(layout.dtype, kind, closed)
        return self._machine.tempo(layout.dtype, kind + CUT, whole) if layout.tensor > 1 else whole

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
        tempos = self.tempos(number, layout)
        forward, backward = parts.forward(tempos.forward), parts.backward(tempos.backward)
        again = 0.0
        if layout.recompute == "full" and parts.is_again:
            again = forward
        elif layout.recompute == "selective" and parts.is_again:
            again = tempos.forward.of((parts.core, parts.cores, parts.scored))
        factor = tempos.backward.products
        return Seconds(forward, backward + again, again, factor * parts.products, factor * parts.columns)

    def _products(self, products: Sequence[Product], dtype: str) -> float:
        return sum(one.flops / self._machine.product_rate(dtype, one.side) for one in products)


def _kind(unit: str) -> str:
    """Return what units of that name are, without a layer's number."""
    return unit.rsplit(" ", 1)[0] if unit.split()[-1].isdigit() else unit


def _scores(work: Work) -> float:
    """Return the scores of a unit's attentions: of two products each makes one."""
    return sum(one.rows * one.columns * one.number for one in work.core[::2])
