"""How a parameter is partitioned over replicas, all-gather of the parts, offload, filling one by one."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, groupby, pairwise
from typing import Any

import torch

from megatron import device
from megatron.mpu.groups import Group
from megatron.mpu.shard import Shard, shard_of
from megatron.torch_compat import all_gather_single
from tds.gradients import buckets

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


# Bringing the parts that the replicas have updated to all of them, a bucket of parameters in one all-gather: twice as
# much is needed meanwhile.


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


# What lies on the CPU while the model is on a device: offload of the optimizer, and with ZeRO 3 of the weights.

HOST = torch.device("cpu")


@dataclass(frozen=True)
class OffloadConfig:
    """What is kept on the CPU. Where the model is there too the copies are separate all the same.

    Args:
        optimizer: masters and moments, which are updated there.
        parameters: the parts of the weights under ZeRO 3.
        is_pinned: in pinned memory, from which a device reads faster.
    """

    optimizer: bool = False
    parameters: bool = False
    is_pinned: bool = True

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy of ``tensor`` on the CPU, in one run of memory of its own."""
        return self._room(tensor).copy_(tensor)

    def copies(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return a ``copy`` of each that is not there yet: started one behind the other, and waited for once."""
        made = [each if each.device == HOST else self._room(each).copy_(each, non_blocking=True) for each in tensors]
        for place in {each.device for each in tensors} - {HOST}:
            device.finish_copies(place)
        return made

    def _room(self, tensor: torch.Tensor) -> torch.Tensor:
        pins = self.is_pinned and tensor.device != HOST and device.can_pin(tensor.device.type)
        return torch.empty(tensor.shape, dtype=tensor.dtype, device=HOST, pin_memory=pins)


NOTHING = OffloadConfig()


# How weights come to a ZeRO 3 that cuts them one by one, so that no device ever holds the whole model.
#
# | | on the host | on the device |
# |---|---|---|
# | before a weight is adopted | its shape alone, or the values that its module has set | nothing |
# | meanwhile | its values | its parts |
# | from then on | nothing | its parts, and one number, NaN, that stands for the others |
#
# A weight that is not cut (a single number) goes to the device whole.


@dataclass(frozen=True)
class ParamInit:
    """Where weights go, and how they get their values.

    Args:
        device: where the model is trained.
        fill: gives a weight its values, on the host, the same on all replicas. Collective over them.
    """

    device: torch.device
    fill: Callable[[torch.nn.Parameter], None]

    def come(self, parameter: torch.nn.Parameter, *, is_cut: bool) -> None:
        """Have the values of ``parameter`` on the host, or where it is trained, if no replica cuts it."""
        self.fill(parameter)
        if not is_cut:
            device.give(parameter, parameter.detach().to(self.device))

    def leave(self, parameter: torch.nn.Parameter) -> None:
        """Forget the values of ``parameter``, of which its parts have been taken."""
        nothing = torch.full((), torch.nan, dtype=parameter.dtype, device=self.device)
        device.give(parameter, nothing.expand(parameter.shape))
