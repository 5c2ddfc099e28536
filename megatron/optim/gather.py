"""Bringing the parts that the replicas have updated to all of them, many parameters in one all-gather."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from megatron.mpu.groups import Group
from megatron.optim.cuts import Cut
from megatron.torch_compat import all_gather_single

BUCKET_BYTES = 32 * 2**20
"""Of the parameters that travel together; a larger one travels alone. Twice as much is needed while they do."""


@dataclass(frozen=True)
class Piece:
    """A parameter, this replica's part of its master, and how the parameter is cut."""

    parameter: torch.Tensor
    master: torch.Tensor
    cut: Cut

    @property
    def room(self) -> int:
        """Numbers of the largest part, which each replica's has room for: so all send alike."""
        longest = max(length for _, _, length in self.cut.runs)
        return self.parameter.numel() // self.parameter.shape[self.cut.dim] * longest

    def received(self, slots: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield views of the parameter and of what belongs there: as many as parts have lengths, not one a replica.

        Args:
            slots: [d, room], what the replicas have sent.
        """
        dim = self.cut.dim
        for first, number, length in self.cut.runs:
            run = self.parameter.narrow(dim, self.cut.bounds[first], number * length)
            parts = run.unflatten(dim, (number, length)).movedim(dim, 0)  # [number, ..., length, ...]
            yield parts, slots[first : first + number, : parts[0].numel()].view(parts.shape)


def buckets(pieces: Iterable[Piece], bucket_bytes: int | None = None) -> Iterator[list[Piece]]:
    """Yield runs of ``pieces`` whose parameters have at most so many bytes together, or one parameter."""
    limit = BUCKET_BYTES if bucket_bytes is None else bucket_bytes
    bucket: list[Piece] = []
    size = 0
    for piece in pieces:
        num_bytes = piece.parameter.numel() * piece.parameter.element_size()
        if bucket and size + num_bytes > limit:
            yield bucket
            bucket, size = [], 0
        bucket.append(piece)
        size += num_bytes
    if bucket:
        yield bucket


def gather(bucket: Sequence[Piece], group: Group) -> None:
    """Round every replica's masters into the parameters of all. Collective over ``group``; masters may lie on a CPU.

    Args:
        bucket: parameters of one dtype and device, the same in the same order on every replica of ``group``.
    """
    rooms = [piece.room for piece in bucket]
    mine = bucket[0].parameter.new_empty(sum(rooms))
    for piece, slot in zip(bucket, mine.split(rooms), strict=True):
        place = slot[: piece.master.numel()].view(piece.master.shape)
        place.copy_(piece.master, non_blocking=True)  # so a device rounds what it is sent
    every = mine
    if group.size > 1:
        every = mine.new_empty(group.size * len(mine))
        all_gather_single(every, mine, group=group.handle)
    for piece, slots in zip(bucket, every.view(group.size, -1).split(rooms, dim=1), strict=True):
        for parts, sent in piece.received(slots):
            parts.copy_(sent)
