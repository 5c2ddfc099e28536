"""ParamPartition: the shard of a parameter that each replica updates with ZeRO.

A shard is a range of indices along one dimension of the tensor rank's parameter: the dimension that the tensor group
shards, or the first one. It is represented by a ``Shard`` as with tensor parallelism, and checkpoints do not depend on
the ZeRO stage.

Shards consist of full vectors of 16 elements, except at the end of the tensor. On a CPU, torch's fused AdamW processes
such vectors from the start of a tensor and rounds the remaining elements differently, by a unit in the last place.
Shards with other boundaries would therefore not be bitwise equal to ZeRO 0. Matrices of usual sizes can be sharded at
any row. A bias of h elements is sharded over h / 16 replicas; the other replicas hold none of it.

Source: Rajbhandari et al. 2020, "ZeRO: memory optimizations toward training trillion parameter models", section 5.1.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, groupby, pairwise

import torch

from megatron.mpu.shard import Shard, shard_of

VECTOR = 16
"""Elements of a vector: 64 bytes of fp32, the widest register of CPUs and the unit in which fused AdamW splits work."""


@dataclass(frozen=True)
class ParamPartition:
    """Replica i updates the indices ``bounds[i] ... bounds[i + 1]`` of the local tensor along ``dim``."""

    dim: int
    bounds: tuple[int, ...]

    @cached_property
    def runs(self) -> tuple[tuple[int, int, int], ...]:
        """Runs of replicas with equally long shards, at most three: (first replica, replica count, shard length)."""
        runs, first = [], 0
        for length, equal_lengths in groupby(stop - start for start, stop in pairwise(self.bounds)):
            count = len(list(equal_lengths))
            if length:
                runs.append((first, count, length))
            first += count
        return tuple(runs)

    def slice(self, tensor: torch.Tensor, replica: int) -> torch.Tensor:
        """Return one replica's shard as a view of ``tensor``, which has the parameter's shape."""
        return tensor.narrow(self.dim, self.bounds[replica], self.bounds[replica + 1] - self.bounds[replica])

    def slot_numel(self, tensor: torch.Tensor) -> int:
        """Return the number of elements in the largest shard."""
        return tensor.numel() // tensor.shape[self.dim] * max(length for _, _, length in self.runs)

    def pairs(self, full: torch.Tensor, slots: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield paired views of the same elements in ``full`` and ``slots``, one pair per run of replicas.

        Args:
            slots: [d, slot_numel or more], each replica's shard at the start of a row.
        """
        for (first, count, _), slices in zip(self.runs, self.slices(full), strict=True):
            yield slices, slots[first : first + count, : slices[0].numel()].view(slices.shape)

    def slices(self, full: torch.Tensor) -> Iterator[torch.Tensor]:
        """Yield a view of ``full`` for each run of replicas, with shards stacked along a new first dimension."""
        for first, count, length in self.runs:
            run = full.narrow(self.dim, self.bounds[first], count * length)
            yield run.unflatten(self.dim, (count, length)).movedim(self.dim, 0)  # [count, ..., length, ...]

    def shard(self, full: Shard, replica: int) -> Shard:
        """Locate one replica's shard in the global tensor.

        Args:
            full: position of the tensor rank's parameter in the global tensor.
        """
        first, length = 0, full.global_shape[self.dim]
        if full.partition_dim == self.dim:
            first, length = full.start, full.length
        start, stop = (min(bound, length) for bound in self.bounds[replica : replica + 2])  # without padding
        return replace(full, partition_dim=self.dim, start=first + start, length=stop - start)


def partition_of(parameter: torch.Tensor, num_replicas: int) -> ParamPartition | None:
    """Partition ``parameter`` over ``num_replicas`` replicas.

    Scalars and empty parameters have no partition (None): every replica updates them in full.
    """
    if parameter.dim() == 0 or parameter.numel() == 0:
        return None
    position = shard_of(parameter)
    is_unsharded = tuple(parameter.shape) == tuple(position.global_shape)
    dim = 0 if is_unsharded or position.partition_dim is None else position.partition_dim
    size = parameter.shape[dim]
    step = VECTOR // math.gcd(VECTOR, parameter.numel() // size)
    if dim > 0 and size % step:  # each row would end with a remainder of a vector, so one replica updates everything
        step = size
    return ParamPartition(dim, tuple(min(step * bound, size) for bound in _even_bounds(-(-size // step), num_replicas)))


def _even_bounds(num_items: int, num_ranges: int) -> list[int]:
    """Return the bounds of ``num_ranges`` ranges over ``num_items`` items; the first ranges may have one item more."""
    size, num_larger = divmod(num_items, num_ranges)
    return [0, *accumulate(size + (idx < num_larger) for idx in range(num_ranges))]
