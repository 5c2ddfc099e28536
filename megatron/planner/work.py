"""Seconds that one rank spends in the units of a model on one micro-batch, messages apart.

| part | forward | backward |
|---|---|---|
| products | flops / rate(side) | twice as many; the core of fused attention 2.5 times |
| passes over what is kept | 2 x bytes kept / bandwidth of memory | 3 x |
| head | 3 x bytes of the logits / bandwidth | 2 x |
| operations | each has its overhead | twice as many |
| gradients of weights | | read, and added to the sum of the micro-batches: 10 bytes in 16 bits, 12 in 32 |

Recomputation adds a forward to the backward: of the layers, or of the cores of attention.

What is kept of a layer is written once in forward and read about once more by the operation that follows; backward
reads it, and writes a gradient for about as much. Norms, dropout and sums with the residual stream all pass so.
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

FORWARD_PASSES, BACKWARD_PASSES = 2.0, 3.0
HEAD_FORWARD, HEAD_BACKWARD = 3.0, 2.0
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


class Clock:
    """Tells how long units take on ``machine`` in layouts of one model."""

    def __init__(self, costs: Costs, machine: Machine) -> None:
        self._costs, self._machine = costs, machine

    def units(self, layout: Layout) -> list[Seconds]:
        """Return the seconds of each unit for a micro-batch."""
        b, t, width = layout.micro_batch_size, layout.tensor, BYTES[layout.dtype]
        works = self._costs.unit_work(b, t, width)
        kept = self._costs.unit_kept(b, t, width, layout.sequence)
        held = self._costs.unit_parameters(t)
        known: dict[tuple[int, Kept, int], Seconds] = {}  # layers are alike
        found = []
        for number, (work, own, parameters) in enumerate(zip(works, kept, held, strict=True)):
            key = id(work), own, parameters
            if key not in known:
                is_head = number == len(works) - 1
                logits = self._costs.logit_bytes(b, t, width) if is_head else 0
                known[key] = self._unit(work, own, parameters, logits, layout)
            found.append(known[key])
        return found

    def _unit(self, work: Work, kept: Kept, parameters: int, logits: int, layout: Layout) -> Seconds:
        machine, width = self._machine, BYTES[layout.dtype]
        products, core = (self._products(some, layout.dtype) for some in (work.products, work.core))
        started = work.operations * machine.overhead_s
        passes, head = kept.full / machine.memory_bandwidth, logits / machine.memory_bandwidth
        forward = products + core + FORWARD_PASSES * passes + HEAD_FORWARD * head + started
        is_fused = not kept.core
        adding = (width + 8) * parameters / machine.memory_bandwidth
        backward = 2 * products + (CORE_BACKWARD if is_fused else 2) * core + adding + 2 * started
        backward += BACKWARD_PASSES * passes + HEAD_BACKWARD * head
        again = 0.0
        if layout.recompute == "full" and kept.input:
            again = forward
        elif layout.recompute == "selective" and kept.input:
            again = core + FORWARD_PASSES * kept.core / machine.memory_bandwidth
        columns = self._products([one for one in work.products if one.is_column], layout.dtype)
        return Seconds(forward, backward + again, again, products, columns)

    def _products(self, products: Sequence[Product], dtype: str) -> float:
        return sum(one.flops / self._machine.product_rate(dtype, one.side) for one in products)
