"""Messages of a step: their bytes on a rank, their seconds, and how many of these other work hides.

| kind | for each | a rank of n sends |
|---|---|---|
| tensor | sum of activations of X bytes over t ranks | 2 (t - 1) / t X |
| ... with sequence parallelism | in place of a sum of forward an all-gather and a reduce-scatter; of backward two all-gathers (of the output's gradient, and of the input once more, which zb-h1 and compiled layers keep) and a reduce-scatter | 2 (t - 1) / t X; 3 (t - 1) / t X |
| pipeline | boundary and micro-batch, each way | s b h numbers; from the seam of a T5 on those of both sides |
| data | sum of gradients over d replicas, ZeRO 0 and 1 | 2 (d - 1) / d x 4 bytes of a parameter |
| ... ZeRO 1 and 2 also | weights after the update | (d - 1) / d x a weight |
| ... ZeRO 2 | micro-batch, in place of the sum | (d - 1) / d x 4 |
| ... ZeRO 3 | micro-batch: the same, and weights gathered twice | (d - 1) / d x (4 + 2 x a weight) |

Backward starts the sum of a column layer's gradient ahead of that layer's product for weights, and joins its input
beside the product for the input. All other messages of tensor ranks are waited for, those around the head too.

A group whose ranks lie in one node uses the node's links; one that leaves it goes as fast as the network cards of its
members in a node together, for as many groups share these. The tensor axis runs fastest, then the data axis.

Sources: Narayanan et al. 2021, section 3; Rajbhandari et al. 2020, "ZeRO", section 7.
"""  # noqa: E501

from __future__ import annotations

import math
from dataclasses import dataclass

from megatron.planner.machine import Link, Machine, Wire


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
