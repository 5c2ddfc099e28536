"""Reduction: sums gradients over the replicas; each replica keeps only its shards of the sums.

| backend | collective, for n bytes on d replicas | order of the additions |
|---|---|---|
| NCCL | a reduce-scatter, n (d - 1) / d; an all-reduce for unsharded gradients | NCCL's |
| others | an all-reduce, twice as much | the order of ZeRO 0, bitwise equal with the same buckets |

Gradients of unsharded parameters (scalars) are all-reduced with every backend. In a reduce-scatter, each replica would
receive a sum with a different order of additions, and the copies of the weight would diverge. gloo implements a
reduce-scatter by an all-reduce, so an all-reduce costs no more than a reduce-scatter there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from megatron.mpu.groups import Group
from megatron.optim.zero.partition import ParamPartition
from megatron.torch_compat import reduce_scatter_single
from tds.grad_norm import accurate_dtype


@dataclass(frozen=True)
class LocalGrad:
    """This replica's gradient for a parameter, before the reduction.

    Args:
        gradient: None if backward has computed none, which counts as zeros.
        partition: partition over the replicas; None if every replica keeps the full sum.
    """

    gradient: torch.Tensor | None
    parameter: torch.nn.Parameter
    partition: ParamPartition | None

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the sum."""
        return accurate_dtype(self.parameter.dtype)

    def shard_shape(self, replica: int) -> tuple[int, ...]:
        """Return the shape of a replica's shard."""
        shape = list(self.parameter.shape)
        if self.partition is not None:
            shape[self.partition.dim] = self.partition.bounds[replica + 1] - self.partition.bounds[replica]
        return tuple(shape)

    def slot_numel(self, num_replicas: int) -> int:
        """Return the number of elements in the largest shard."""
        return max(torch.Size(self.shard_shape(replica)).numel() for replica in range(num_replicas))

    def shard(self, full: torch.Tensor, replica: int) -> torch.Tensor:
        """Return one replica's view of ``full``."""
        return full if self.partition is None else self.partition.slice(full, replica)


class Reduction:
    """A running sum, in one or two messages.

    Args:
        is_scattered: use a reduce-scatter; None chooses by the backend.
    """

    def __init__(self, grads: Sequence[LocalGrad], group: Group, *, is_scattered: bool | None = None) -> None:
        """Start the sum of ``grads``, which share a dtype and have the same order on all replicas. Collective."""
        if is_scattered is None:
            is_scattered = dist.get_backend(group.handle) == "nccl"
        messages = [(grads, False)]
        if is_scattered:
            sharded = [grad for grad in grads if grad.partition is not None]
            messages = [(sharded, True), ([grad for grad in grads if grad.partition is None], False)]
        self._messages = [
            _Message.start(message_grads, group, is_scattered=scatter)
            for message_grads, scatter in messages
            if message_grads
        ]

    def shards(self) -> Iterator[tuple[torch.nn.Parameter, torch.Tensor]]:
        """Wait for the sum; yield each parameter with a copy of this replica's shard."""
        for message in self._messages:
            yield from message.shards()


@dataclass
class _Message:
    """A running collective: ``flat`` contains the sum once ``work`` is done."""

    grads: Sequence[LocalGrad]
    group: Group
    flat: torch.Tensor
    work: Any
    is_scattered: bool

    @classmethod
    def start(cls, grads: Sequence[LocalGrad], group: Group, *, is_scattered: bool) -> _Message:
        if is_scattered:
            slots = _in_slots(grads, group.size)
            local = slots.new_empty(slots.shape[1])
            work = reduce_scatter_single(local, slots.view(-1), group=group.handle, async_op=True)
            return cls(grads, group, local, work, True)
        flat = _flattened(grads)
        return cls(grads, group, flat, dist.all_reduce(flat, group=group.handle, async_op=True), False)

    def shards(self) -> Iterator[tuple[torch.nn.Parameter, torch.Tensor]]:
        self.work.wait()
        start = 0
        for grad in self.grads:
            shape = grad.shard_shape(self.group.rank)
            if self.is_scattered:
                numel = grad.slot_numel(self.group.size)
                shard = self.flat[start : start + torch.Size(shape).numel()].view(shape)
            else:
                numel = grad.parameter.numel()
                shard = grad.shard(self.flat[start : start + numel].view(grad.parameter.shape), self.group.rank)
            yield grad.parameter, shard.clone(memory_format=torch.contiguous_format)  # a view would keep ``flat`` alive
            start += numel


def _flattened(grads: Sequence[LocalGrad]) -> torch.Tensor:
    """Concatenate all gradients in the accumulation dtype."""
    numels = [grad.parameter.numel() for grad in grads]
    flat = torch.zeros(sum(numels), dtype=grads[0].dtype, device=grads[0].parameter.device)
    for grad, target in zip(grads, flat.split(numels), strict=True):
        if grad.gradient is not None:
            target.view(grad.parameter.shape).copy_(grad.gradient)
    return flat


def _in_slots(grads: Sequence[LocalGrad], num_replicas: int) -> torch.Tensor:
    """Return a tensor [d, slots] whose row r contains replica r's shards of all gradients."""
    numels = [grad.slot_numel(num_replicas) for grad in grads]
    slots = torch.zeros(num_replicas, sum(numels), dtype=grads[0].dtype, device=grads[0].parameter.device)
    for grad, targets in zip(grads, slots.split(numels, dim=1), strict=True):
        if grad.gradient is None:
            continue
        assert grad.partition is not None  # unsharded gradients are all-reduced
        for shards, target in grad.partition.pairs(grad.gradient, targets):
            target.copy_(shards)
    return slots
