"""How a parameter is partitioned over replicas, all-gather of the parts, offload, filling one by one."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, groupby, pairwise

import torch

from megatron.mpu.shard import Shard, shard_of

# How ZeRO cuts a parameter over the replicas: which part of it each of them updates.
#
# A part is a run of indices along one dimension of what the tensor rank holds: the dimension that the tensor group
# cuts, or the first where it cuts none. So it is a ``Shard`` as any other, and checkpoints do not tell one stage from
# another.
#
# Parts hold whole vectors of 16 numbers, or the last ones of the tensor. torch's fused AdamW on a CPU takes such
# vectors from the start of a tensor and rounds the numbers that remain at its end otherwise, by a unit in the last
# place: parts that began elsewhere would not get the bits of ZeRO 0. Matrices of the usual sizes can be cut at any row;
# of a bias of h numbers h / 16 replicas get a part and the others none.
#
# Source: Rajbhandari et al. 2020, "ZeRO: memory optimizations toward training trillion parameter models", section 5.1.

VECTOR = 16
"""Numbers: 64 bytes of fp32, the widest register of CPUs and the unit in which fused AdamW shares work over threads."""


@dataclass(frozen=True)
class ParamPartition:
    """Replica i updates the indices ``bounds[i] ... bounds[i + 1]`` of the local tensor along ``dim``."""

    dim: int
    bounds: tuple[int, ...]

    @cached_property
    def runs(self) -> tuple[tuple[int, int, int], ...]:
        """(first replica, their number, indices of each) for replicas with parts of one length; three runs at most."""
        found, first = [], 0
        for length, same in groupby(stop - start for start, stop in pairwise(self.bounds)):
            number = len(list(same))
            if length:
                found.append((first, number, length))
            first += number
        return tuple(found)

    def part(self, tensor: torch.Tensor, replica: int) -> torch.Tensor:
        """Return the view of one replica's part of ``tensor``, which has the shape of the parameter."""
        return tensor.narrow(self.dim, self.bounds[replica], self.bounds[replica + 1] - self.bounds[replica])

    def room(self, tensor: torch.Tensor) -> int:
        """Return the numbers of the largest part of ``tensor``."""
        return tensor.numel() // tensor.shape[self.dim] * max(length for _, _, length in self.runs)

    def pairs(self, whole: torch.Tensor, slots: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield views of ``whole`` and of where they lie in ``slots``: one for each length of a part, three at most.

        Args:
            slots: [d, room or more], the part of each replica at its start.
        """
        for (first, number, _), parts in zip(self.runs, self.parts(whole), strict=True):
            yield parts, slots[first : first + number, : parts[0].numel()].view(parts.shape)

    def parts(self, whole: torch.Tensor) -> Iterator[torch.Tensor]:
        """Yield the parts of ``whole``, cut along ``dim``, as views of those of one length."""
        for first, number, length in self.runs:
            run = whole.narrow(self.dim, self.bounds[first], number * length)
            yield run.unflatten(self.dim, (number, length)).movedim(self.dim, 0)  # [number, ..., length, ...]

    def shard(self, whole: Shard, replica: int) -> Shard:
        """Return where one replica's part lies in the global tensor of which this tensor rank holds ``whole``."""
        first, real = 0, whole.global_shape[self.dim]
        if whole.partition_dim == self.dim:
            first, real = whole.start, whole.length
        start, stop = (min(bound, real) for bound in self.bounds[replica : replica + 2])  # padding is nobody's
        return replace(whole, partition_dim=self.dim, start=first + start, length=stop - start)


def partition_of(parameter: torch.Tensor, replicas: int) -> ParamPartition | None:
    """Return how ``parameter`` is cut over so many replicas; None for a single number, which all of them update."""
    if parameter.dim() == 0 or parameter.numel() == 0:
        return None
    whole = shard_of(parameter)
    is_held_whole = tuple(parameter.shape) == tuple(whole.global_shape)
    dim = 0 if is_held_whole or whole.partition_dim is None else whole.partition_dim
    size = parameter.shape[dim]
    step = VECTOR // math.gcd(VECTOR, parameter.numel() // size)
    if dim > 0 and size % step:  # the last numbers of the tensor are not those of one part: nobody could share it
        step = size
    return ParamPartition(dim, tuple(min(step * steps, size) for steps in _even_bounds(-(-size // step), replicas)))


def _even_bounds(number: int, parts: int) -> list[int]:
    """Return the bounds of ``parts`` runs of ``number`` things; the first ones have one more where they must."""
    each, more = divmod(number, parts)
    return [0, *accumulate(each + (part < more) for part in range(parts))]
