"""All-gather of weights after the replicas have updated their shards, with one message per bucket of parameters.

Source: Rajbhandari et al. 2020, "ZeRO: memory optimizations toward training trillion parameter models", section 5.1.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megatron.mpu.groups import Group
from megatron.optim.zero.partition import VECTOR, ParamPartition
from megatron.torch_compat import all_gather_single
from tds.gradients import make_buckets


@dataclass(frozen=True)
class ShardedWeight:
    """A parameter to be gathered.

    Args:
        parameter: full tensor into which the gather writes.
        shard: this replica's shard of the values: its main param, or its weight shard under ZeRO 3.
        partition: partition of the parameter over the replicas.
    """

    parameter: torch.Tensor
    shard: torch.Tensor
    partition: ParamPartition

    @property
    def slot_numel(self) -> int:
        """Number of elements that every replica sends: the size of the largest shard."""
        return self.partition.slot_numel(self.parameter)

    def copy_pairs(self, slots: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield paired views of the parameter and the gathered values in ``slots`` [d, slot]."""
        return self.partition.pairs(self.parameter, slots)


def gather_all(weights: Iterable[ShardedWeight], group: Group, bucket_numel: int | None = None) -> None:
    """Round all replicas' shards into the full parameters, bucket by bucket. Collective over ``group``.

    Args:
        weights: weights on one device, in the same order on every replica. Shards may be on the CPU.
        bucket_numel: elements per bucket; None: limited by ``BUCKET_BYTES``.
    """
    for bucket in buckets_of_weights(weights, bucket_numel):
        Gather.start(bucket, group).finish()


def buckets_of_weights(
    weights: Iterable[ShardedWeight], bucket_numel: int | None = None
) -> Iterator[list[ShardedWeight]]:
    """Yield ``weights`` in single-dtype buckets; see ``gather_all``."""

    def size(weight: ShardedWeight) -> int:
        return weight.parameter.nbytes if bucket_numel is None else weight.parameter.numel()

    return make_buckets(weights, size, lambda weight: weight.parameter.dtype, bucket_numel)


@dataclass(frozen=True)
class Gather:
    """A running all-gather of one bucket: ``gathered`` has a row for each replica once ``work`` is done."""

    bucket: Sequence[ShardedWeight]
    gathered: torch.Tensor
    work: Any
    num_notes: int = 0

    @classmethod
    @torch.no_grad()
    def start(cls, bucket: Sequence[ShardedWeight], group: Group, note: Sequence[int] = ()) -> Gather:
        """Start an all-gather of the current shard values. Collective over ``group``.

        Args:
            bucket: weights with one dtype and device, in the same order on every replica.
            note: small integers to send along; every replica must send equally many.
        """
        slot_numels = [weight.slot_numel for weight in bucket]
        note_numel = -(-len(note) // VECTOR) * VECTOR  # the next replica's row starts at a full vector
        row = bucket[0].parameter.new_empty(sum(slot_numels) + note_numel)
        if note:
            row[-note_numel:].zero_()
            for idx, value in enumerate(note):
                if value:
                    row[idx - note_numel].fill_(value)
        for weight, slot in zip(bucket, row[: sum(slot_numels)].split(slot_numels), strict=True):
            target = slot[: weight.shard.numel()].view(weight.shard.shape)
            target.copy_(weight.shard, non_blocking=True)  # the device rounds the received values
        if group.size == 1:
            return cls(bucket, row.view(1, -1), None, len(note))
        gathered = row.new_empty(group.size * len(row))
        work = all_gather_single(gathered, row, group=group.handle, async_op=True)
        return cls(bucket, gathered.view(group.size, -1), work, len(note))

    def wait(self) -> None:
        """Wait for the gather. On a device, the current stream waits and the host does not."""
        if self.work is not None:
            self.work.wait()

    @property
    def notes(self) -> torch.Tensor:
        """All replicas' notes, [d, num_notes], after ``wait``."""
        return self.gathered[:, sum(weight.slot_numel for weight in self.bucket) :][:, : self.num_notes]

    @torch.no_grad()
    def finish(self) -> None:
        """Wait for the gather and copy the values into the parameters."""
        self.wait()
        slot_numels = [weight.slot_numel for weight in self.bucket]
        slots_of_weights = self.gathered[:, : sum(slot_numels)].split(slot_numels, dim=1)
        for weight, slots in zip(self.bucket, slots_of_weights, strict=True):
            for target, values in weight.copy_pairs(slots):
                target.copy_(values)
