"""Assignment of full matrices to owners among the ranks that hold slices, and the exchange of slices with owners."""

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

# A weight is sharded over the tensor ranks, and with ZeRO the shard of each tensor rank is sharded over the replicas.
# An operation on the full matrix (Muon's orthogonalization) runs once, on one owner in the grid of replicas x tensor
# ranks:
#
# | direction | sent over the replicas | sent over the tensor ranks of one replica |
# |---|---|---|
# | to the owner | with ZeRO, slices of one tensor rank's shard | shards of the matrix |
# | from the owner | with ZeRO, slices of one tensor rank's shard; otherwise the full shard | shards of the matrix |
#
# Main params, moments and gradients are sharded as for every other optimizer. Memory is therefore balanced for matrices
# of any shape, and checkpoints and gathers of weights need no other partition. By default matrices are sent in bf16,
# the input and output dtype of Newton-Schulz: 2 bytes per element in each direction, next to 4 for gradients and 2
# for weights. With other precisions the dtype is that of main params (``newton_schulz.exchange_dtype``). Without ZeRO
# the replicas share the work as well.
#
# Experts that are distributed over expert-parallel ranks have fewer replicas: the ranks of the expert-data group. They
# have a separate grid, tensor ranks x expert-data ranks, so that each expert has one owner among its replicas.
#
# Source: Liu et al. 2025, "Muon is scalable for LLM training", section 2.3 and algorithm 1, in which every replica
# computes all matrices of which it has a slice; Ahn et al. 2025, "Dion", for owners on a grid.

OWNER_MAX_NUMEL = 1 << 26
"""Approximate number of elements of full matrices that an owner holds at a time: 128 MiB each of inputs and results."""


@dataclass(frozen=True)
class MatrixPartition:
    """Partition of a weight [m, n] over ranks.

    Args:
        shape: shape of the full weight.
        tensor: partition over tensor ranks; None: each holds the full weight.
        data: partition of a tensor rank's shard over replicas; None: each holds the full shard.
    """

    shape: tuple[int, int]
    tensor: ParamPartition | None
    data: ParamPartition | None

    @classmethod
    def of(cls, parameter: torch.Tensor, tensor: Group, num_replicas: int) -> MatrixPartition:
        """Build the partition of ``parameter``.

        Args:
            num_replicas: number of replicas over which ZeRO shards the parameter; 1: every replica has the full shard.

        Raises:
            ValueError: shards differ in size between tensor ranks.
        """
        shard = shard_of(parameter)
        tensor_partition = None
        if shard.partition_dim is not None and tensor.size > 1:
            local_size, global_size = parameter.shape[shard.partition_dim], shard.global_shape[shard.partition_dim]
            if local_size * tensor.size != global_size or shard.start != tensor.rank * local_size:
                raise ValueError(
                    f"a matrix must be split evenly over {tensor.size} tensor ranks, got {local_size} of {global_size} "
                    "rows or columns"
                )
            tensor_partition = ParamPartition(
                shard.partition_dim, tuple(local_size * rank for rank in range(tensor.size + 1))
            )
        rows, columns = shard.global_shape
        return cls(
            (rows, columns), tensor_partition, partition_of(parameter, num_replicas) if num_replicas > 1 else None
        )

    @property
    def local_shape(self) -> tuple[int, int]:
        """Shape of a tensor rank's shard."""
        return _shard_shape(self.shape, self.tensor, 0)


def _shard_shape(shape: tuple[int, int], partition: ParamPartition | None, rank: int) -> tuple[int, int]:
    if partition is None:
        return shape
    local_shape = list(shape)
    local_shape[partition.dim] = partition.bounds[rank + 1] - partition.bounds[rank]
    return local_shape[0], local_shape[1]


def assign_owners(costs: Sequence[int], num_owners: int) -> list[int]:
    """Assign an owner below ``num_owners`` to each item of ``costs``.

    Items are assigned by descending cost, each to the owner with the smallest total so far.
    """
    load = [(0, owner) for owner in range(num_owners)]
    assigned = [0] * len(costs)
    for idx in sorted(range(len(costs)), key=lambda item: (-costs[item], item)):
        cost, owner = heapq.heappop(load)
        assigned[idx] = owner
        heapq.heappush(load, (cost + costs[idx], owner))
    return assigned


def exchange_batches(
    partitions: Sequence[MatrixPartition], num_owners: int, max_numel: int | None = None
) -> Iterator[range]:
    """Yield index ranges of weights to exchange together, limited by the memory of ``num_owners`` owners.

    Args:
        partitions: partition of each weight.
        max_numel: maximum number of full-matrix elements per owner; None: ``OWNER_MAX_NUMEL``.
    """
    limit, start, numel = num_owners * (max_numel or OWNER_MAX_NUMEL), 0, 0
    for idx, partition in enumerate(partitions):
        size = math.prod(partition.shape)
        if numel and numel + size > limit:
            yield range(start, idx)
            start, numel = idx, 0
        numel += size
    if numel:
        yield range(start, len(partitions))


@dataclass(frozen=True)
class ExchangedTensor:
    """A tensor that the ranks of one group send to its owner or receive from it.

    Args:
        shape: shape of the full tensor.
        partition: partition over the group; None: each rank holds the full tensor.
        owner: rank that receives the full tensor.
    """

    shape: tuple[int, int]
    partition: ParamPartition | None
    owner: int

    def shard_shape(self, rank: int) -> tuple[int, int]:
        """Return the shape of the slice on ``rank``."""
        return _shard_shape(self.shape, self.partition, rank)

    def numel_to_owner(self, rank: int) -> int:
        """Return the number of elements that ``rank`` sends to the owner.

        Without a partition the owner holds the full tensor already, and other ranks send nothing.
        """
        return 0 if self.partition is None and rank != self.owner else math.prod(self.shard_shape(rank))


def to_owners(weights: Sequence[ExchangedTensor], slices: Sequence[torch.Tensor], group: Group) -> list[torch.Tensor]:
    """Gather full tensors for the ``weights`` that this rank owns, in order. Collective over ``group``.

    Args:
        slices: this rank's slice of each weight, all in one dtype.
    """
    owned = [idx for idx, weight in enumerate(weights) if weight.owner == group.rank]
    if group.size == 1:
        return [slices[idx] for idx in owned]
    sent = [
        tensor.reshape(-1)[: weight.numel_to_owner(group.rank)]
        for _, weight, tensor in sorted(_by_owner(weights, slices), key=lambda entry: entry[0])
    ]
    counts_out = [0] * group.size
    for weight in weights:
        counts_out[weight.owner] += weight.numel_to_owner(group.rank)
    counts_in = [sum(weights[idx].numel_to_owner(rank) for idx in owned) for rank in range(group.size)]
    received = _all_to_all(sent, counts_out, counts_in, group, slices[0])
    full_tensors = [received.new_empty(weights[idx].shape) for idx in owned]
    for rank, from_rank in enumerate(received.split(counts_in)):
        numels = [weights[idx].numel_to_owner(rank) for idx in owned]
        for idx, full, flat in zip(owned, full_tensors, from_rank.split(numels), strict=True):
            partition = weights[idx].partition
            if flat.numel():
                target = full if partition is None else partition.slice(full, rank)
                target.copy_(flat.view(target.shape))
    return full_tensors


def from_owners(
    weights: Sequence[ExchangedTensor], full_tensors: Sequence[torch.Tensor], group: Group, like: torch.Tensor
) -> list[torch.Tensor]:
    """Scatter ``weights`` from their owners; return this rank's slice of each. Collective over ``group``.

    Args:
        full_tensors: full tensors that this rank owns, in order.
        like: a tensor with the result's dtype and device, for ranks that own no weight.
    """
    if group.size == 1:
        return list(full_tensors)
    owned = [weight for weight in weights if weight.owner == group.rank]
    sent, counts_out = [], []
    for rank in range(group.size):
        rank_slices = [
            full if weight.partition is None else weight.partition.slice(full, rank)
            for weight, full in zip(owned, full_tensors, strict=True)
        ]
        sent += [tensor.reshape(-1) for tensor in rank_slices]
        counts_out.append(sum(tensor.numel() for tensor in rank_slices))
    idx_by_owner = [[idx for idx, weight in enumerate(weights) if weight.owner == rank] for rank in range(group.size)]
    numels = [[math.prod(weights[idx].shard_shape(group.rank)) for idx in indices] for indices in idx_by_owner]
    received = _all_to_all(sent, counts_out, [sum(group_numels) for group_numels in numels], group, like)
    slices: dict[int, torch.Tensor] = {}
    flat = received.split([numel for group_numels in numels for numel in group_numels])
    for idx, tensor in zip((idx for group_numels in idx_by_owner for idx in group_numels), flat, strict=True):
        slices[idx] = tensor.view(weights[idx].shard_shape(group.rank))
    return [slices[idx] for idx in range(len(weights))]


@dataclass(frozen=True)
class OwnerGrid:
    """The ranks among which full matrices are distributed: replicas x tensor ranks. An owner is an index in the grid.

    Args:
        tensor: tensor ranks of one replica.
        data: replicas of one tensor rank's shards; for experts, the ranks that hold the same experts.
    """

    tensor: Group
    data: Group

    @property
    def num_owners(self) -> int:
        """Number of ranks in the grid."""
        return self.tensor.size * self.data.size

    def owned(self, owners: Sequence[int]) -> list[int]:
        """List the indices of the weights that this rank owns."""
        rank = self.data.rank * self.tensor.size + self.tensor.rank
        return [idx for idx, owner in enumerate(owners) if owner == rank]

    def gather(
        self, partitions: Sequence[MatrixPartition], owners: Sequence[int], slices: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Return the full matrices that this rank owns, in order. Collective.

        Args:
            partitions, owners, slices: partition, owner, and this rank's slice of each weight.
        """
        over_data, over_tensor = self._exchanged(partitions, owners)
        shards = to_owners(over_data, slices, self.data)
        return to_owners(over_tensor, shards, self.tensor) if over_tensor else []

    def scatter(
        self,
        partitions: Sequence[MatrixPartition],
        owners: Sequence[int],
        full_tensors: Sequence[torch.Tensor],
        like: torch.Tensor,
    ) -> list[torch.Tensor]:
        """Return this rank's slice of each weight from the owners' ``full_tensors``. Collective.

        Args:
            full_tensors: the matrices that this rank owns, in order.
            like: a tensor with the result's dtype and device, for ranks that own no weight.
        """
        over_data, over_tensor = self._exchanged(partitions, owners)
        shards = from_owners(over_tensor, full_tensors, self.tensor, like) if over_tensor else []
        return from_owners(over_data, shards, self.data, like)

    def _exchanged(
        self, partitions: Sequence[MatrixPartition], owners: Sequence[int]
    ) -> tuple[list[ExchangedTensor], list[ExchangedTensor]]:
        """Describe the exchange over ``data``, and that over ``tensor`` for the weights of this replica's owners."""
        over_data, over_tensor = [], []
        for partition, owner in zip(partitions, owners, strict=True):
            replica, tensor_rank = divmod(owner, self.tensor.size)
            over_data.append(ExchangedTensor(partition.local_shape, partition.data, replica))
            if replica == self.data.rank:
                over_tensor.append(ExchangedTensor(partition.shape, partition.tensor, tensor_rank))
        return over_data, over_tensor


def _by_owner(
    weights: Sequence[ExchangedTensor], slices: Sequence[torch.Tensor]
) -> Iterable[tuple[int, ExchangedTensor, torch.Tensor]]:
    return ((weight.owner, weight, tensor) for weight, tensor in zip(weights, slices, strict=True))


def _all_to_all(
    sent: Sequence[torch.Tensor], counts_out: list[int], counts_in: list[int], group: Group, like: torch.Tensor
) -> torch.Tensor:
    """Exchange elements; return the received ones in rank order."""
    flat = torch.cat([like.new_empty(0), *sent])
    received = like.new_empty(sum(counts_in))
    dist.all_to_all_single(received, flat, counts_in, counts_out, group=group.handle)
    return received
