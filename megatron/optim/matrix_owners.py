"""Whole matrices for who computes with them: their owners among ranks that hold parts, and the way there and back."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megatron.mpu.groups import Group
from megatron.mpu.shard import shard_of
from megatron.optim.zero.partition import ParamPartition, partition_of

# A weight is cut over the tensor ranks, and with ZeRO what each of them holds is cut over the replicas. What looks at
# the whole (Muon's orthogonalisation) is computed once, by one owner on the grid of replicas x tensor ranks:
#
# | | over the replicas | over the tensor ranks of one replica |
# |---|---|---|
# | to the owner | parts of what one tensor rank holds, with ZeRO | parts of the whole |
# | back | those parts, or without ZeRO the whole | parts of the whole |
#
# Main params, moments and gradients are sharded as for every other optimizer: memory is as even as before, whatever the
# shapes are, and checkpoints and gathers of weights need no other partition. Matrices are sent in bf16, in which
# Newton-Schulz starts and ends anyway: 2 bytes per element each way, in addition to the 4 and 2 of gradients and
# weights. Without ZeRO the replicas share the work too.
#
# Source: Liu et al. 2025, "Muon is scalable for LLM training", section 2.3 and algorithm 1, where every replica
# computes what it has a part of; Ahn et al. 2025, "Dion", for owners on a grid.

OWN_NUMBERS = 1 << 26
"""Numbers of whole matrices that an owner has at a time, about: 128 MiB in bf16, twice."""


@dataclass(frozen=True)
class MatrixPartition:
    """A weight [m, n] and how the ranks hold it.

    Args:
        shape: of the whole.
        tensor: over the tensor ranks; None: each has the whole.
        data: what a tensor rank has, over the replicas; None: each has all of it.
    """

    shape: tuple[int, int]
    tensor: ParamPartition | None
    data: ParamPartition | None

    @classmethod
    def of(cls, parameter: torch.Tensor, tensor: Group, replicas: int) -> MatrixPartition:
        """Return how ``parameter`` is held where ZeRO cuts it over so many ``replicas``; 1: it does not.

        Raises:
            ValueError: tensor ranks hold other numbers of rows or columns than each other.
        """
        shard = shard_of(parameter)
        over_tensor = None
        if shard.partition_dim is not None and tensor.size > 1:
            each, size = parameter.shape[shard.partition_dim], shard.global_shape[shard.partition_dim]
            if each * tensor.size != size or shard.start != tensor.rank * each:
                raise ValueError(
                    f"a matrix must be cut evenly over {tensor.size} tensor ranks, got {each} of {size} rows or columns"
                )
            over_tensor = ParamPartition(shard.partition_dim, tuple(each * rank for rank in range(tensor.size + 1)))
        rows, columns = shard.global_shape
        return cls((rows, columns), over_tensor, partition_of(parameter, replicas) if replicas > 1 else None)

    @property
    def local_shape(self) -> tuple[int, int]:
        """What a tensor rank has."""
        return _part_shape(self.shape, self.tensor, 0)


def _part_shape(shape: tuple[int, int], cut: ParamPartition | None, rank: int) -> tuple[int, int]:
    if cut is None:
        return shape
    sizes = list(shape)
    sizes[cut.dim] = cut.bounds[rank + 1] - cut.bounds[rank]
    return sizes[0], sizes[1]


def owners(costs: Sequence[int], number: int) -> list[int]:
    """Return which of ``number`` owners has each thing: the dearest first, to who has the least to do by then."""
    load = [(0, owner) for owner in range(number)]
    found = [0] * len(costs)
    for index in sorted(range(len(costs)), key=lambda each: (-costs[each], each)):
        cost, owner = heapq.heappop(load)
        found[index] = owner
        heapq.heappush(load, (cost + costs[index], owner))
    return found


def runs_of(cuts: Sequence[MatrixPartition], number: int, numbers: int | None = None) -> Iterator[range]:
    """Yield ranges of weights that are exchanged together, so that each of ``number`` owners has few at a time."""
    room, start, held = number * (numbers or OWN_NUMBERS), 0, 0
    for index, cut in enumerate(cuts):
        size = math.prod(cut.shape)
        if held and held + size > room:
            yield range(start, index)
            start, held = index, 0
        held += size
    if held:
        yield range(start, len(cuts))


@dataclass(frozen=True)
class Held:
    """A weight on its way over one group: what the ranks of the group hold between them, and which rank gets all."""

    shape: tuple[int, int]
    cut: ParamPartition | None
    owner: int

    def part_shape(self, rank: int) -> tuple[int, int]:
        """Return what ``rank`` holds."""
        return _part_shape(self.shape, self.cut, rank)

    def numbers_to_owner(self, rank: int) -> int:
        """Return how many numbers ``rank`` sends to the owner; where nothing is cut the owner has all by itself."""
        return 0 if self.cut is None and rank != self.owner else math.prod(self.part_shape(rank))


def to_owners(weights: Sequence[Held], parts: Sequence[torch.Tensor], group: Group) -> list[torch.Tensor]:
    """Return the wholes of the weights that this rank owns, in their order. Collective over ``group``.

    Args:
        parts: what this rank holds of each of ``weights``, of one dtype.
    """
    mine = [index for index, weight in enumerate(weights) if weight.owner == group.rank]
    if group.size == 1:
        return [parts[index] for index in mine]
    sent = [
        part.reshape(-1)[: weight.numbers_to_owner(group.rank)]
        for _, weight, part in sorted(_by_owner(weights, parts), key=lambda each: each[0])
    ]
    counts_out = [0] * group.size
    for weight in weights:
        counts_out[weight.owner] += weight.numbers_to_owner(group.rank)
    counts_in = [sum(weights[index].numbers_to_owner(rank) for index in mine) for rank in range(group.size)]
    received = _all_to_all(sent, counts_out, counts_in, group, parts[0])
    wholes = [received.new_empty(weights[index].shape) for index in mine]
    for rank, run in enumerate(received.split(counts_in)):
        numbers = [weights[index].numbers_to_owner(rank) for index in mine]
        for index, whole, flat in zip(mine, wholes, run.split(numbers), strict=True):
            cut = weights[index].cut
            if flat.numel():
                place = whole if cut is None else cut.slice(whole, rank)
                place.copy_(flat.view(place.shape))
    return wholes


def from_owners(
    weights: Sequence[Held], wholes: Sequence[torch.Tensor], group: Group, like: torch.Tensor
) -> list[torch.Tensor]:
    """Return this rank's part of each of ``weights``, given the ``wholes`` that it owns. Collective over ``group``.

    Args:
        like: a tensor of their dtype and device, for who owns none.
    """
    if group.size == 1:
        return list(wholes)
    mine = [weight for weight in weights if weight.owner == group.rank]
    sent, counts_out = [], []
    for rank in range(group.size):
        parts = [
            whole if weight.cut is None else weight.cut.slice(whole, rank)
            for weight, whole in zip(mine, wholes, strict=True)
        ]
        sent += [part.reshape(-1) for part in parts]
        counts_out.append(sum(part.numel() for part in parts))
    by_owner = [[index for index, weight in enumerate(weights) if weight.owner == rank] for rank in range(group.size)]
    numbers = [[math.prod(weights[index].part_shape(group.rank)) for index in indices] for indices in by_owner]
    received = _all_to_all(sent, counts_out, [sum(each) for each in numbers], group, like)
    found: dict[int, torch.Tensor] = {}
    flat = received.split([number for each in numbers for number in each])
    for index, part in zip((index for each in by_owner for index in each), flat, strict=True):
        found[index] = part.view(weights[index].part_shape(group.rank))
    return [found[index] for index in range(len(weights))]


def _by_owner(weights: Sequence[Held], parts: Sequence[torch.Tensor]) -> Iterable[tuple[int, Held, torch.Tensor]]:
    return ((weight.owner, weight, part) for weight, part in zip(weights, parts, strict=True))


def _all_to_all(
    sent: Sequence[torch.Tensor], counts_out: list[int], counts_in: list[int], group: Group, like: torch.Tensor
) -> torch.Tensor:
    """Return what the ranks have sent to this one, one rank behind the other."""
    flat = torch.cat([like.new_empty(0), *sent])
    received = like.new_empty(sum(counts_in))
    dist.all_to_all_single(received, flat, counts_in, counts_out, group=group.handle)
    return received
