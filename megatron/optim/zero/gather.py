"""All-gather of the shards of weights, several parameters per message."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megatron.mpu.groups import Group
from megatron.optim.zero.partition import VECTOR, ParamPartition
from megatron.torch_compat import all_gather_single
from tds.gradients import buckets


@dataclass(frozen=True)
class Piece:
    """A parameter, this replica's part of its master, and how the parameter is cut."""

    parameter: torch.Tensor
    master: torch.Tensor
    cut: ParamPartition

    @property
    def room(self) -> int:
        """Numbers of the largest part, which each replica's has room for: so all send alike."""
        return self.cut.room(self.parameter)

    def received(self, slots: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield views of the parameter and of what belongs there of ``slots``, [d, room], which replicas have sent."""
        return self.cut.pairs(self.parameter, slots)


def gather_all(pieces: Iterable[Piece], group: Group, numbers: int | None = None) -> None:
    """Round every replica's masters into the parameters of all, bucket by bucket. Collective over ``group``.

    Args:
        pieces: of parameters on one device, the same in the same order on every replica.
        numbers: of a bucket; None: ``BUCKET_BYTES`` count.
    """
    for bucket in buckets_of_pieces(pieces, numbers):
        gather(bucket, group)


def buckets_of_pieces(pieces: Iterable[Piece], numbers: int | None = None) -> Iterator[list[Piece]]:
    """Yield ``pieces`` in runs of one dtype that are gathered together; as in ``gather_all``."""

    def size(piece: Piece) -> int:
        return piece.parameter.nbytes if numbers is None else piece.parameter.numel()

    return buckets(pieces, size, lambda piece: piece.parameter.dtype, numbers)


def gather(bucket: Sequence[Piece], group: Group) -> None:
    """Round every replica's masters into the parameters of all. Collective over ``group``; masters may lie on a CPU.

    Args:
        bucket: parameters of one dtype and device, the same in the same order on every replica of ``group``.
    """
    Gather.start(bucket, group).finish()


@dataclass(frozen=True)
class Gather:
    """Parts on their way to all replicas: ``every`` holds those of each once ``work`` is done."""

    bucket: Sequence[Piece]
    every: torch.Tensor
    work: Any
    num_notes: int = 0

    @classmethod
    @torch.no_grad()
    def start(cls, bucket: Sequence[Piece], group: Group, note: Sequence[int] = ()) -> Gather:
        """Send this replica's masters as they are now; as ``gather``. Collective.

        Args:
            note: a few small integers that go with them; as many on every replica.
        """
        rooms = [piece.room for piece in bucket]
        behind = -(-len(note) // VECTOR) * VECTOR  # so that the next replica's parts lie where vectors may begin
        mine = bucket[0].parameter.new_empty(sum(rooms) + behind)
        if note:
            mine[-behind:].zero_()
            for place, number in enumerate(note):
                if number:
                    mine[place - behind].fill_(number)
        for piece, slot in zip(bucket, mine[: sum(rooms)].split(rooms), strict=True):
            place = slot[: piece.master.numel()].view(piece.master.shape)
            place.copy_(piece.master, non_blocking=True)  # so a device rounds what it is sent
        if group.size == 1:
            return cls(bucket, mine.view(1, -1), None, len(note))
        every = mine.new_empty(group.size * len(mine))
        work = all_gather_single(every, mine, group=group.handle, async_op=True)
        return cls(bucket, every.view(group.size, -1), work, len(note))

    def wait(self) -> None:
        """Wait for the parts; on a device what is given to the current stream from now on does."""
        if self.work is not None:
            self.work.wait()

    @property
    def notes(self) -> torch.Tensor:
        """What the replicas have noted, [d, ...], once the parts are here."""
        return self.every[:, sum(piece.room for piece in self.bucket) :][:, : self.num_notes]

    @torch.no_grad()
    def finish(self) -> None:
        """Wait for the parts and put them into the parameters."""
        self.wait()
        rooms = [piece.room for piece in self.bucket]
        for piece, slots in zip(self.bucket, self.every[:, : sum(rooms)].split(rooms, dim=1), strict=True):
            for parts, sent in piece.received(slots):
                parts.copy_(sent)
