"""Bringing the parts that the replicas have updated to all of them, many parameters in one all-gather."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megatron.mpu.groups import Group
from megatron.optim.cuts import Cut

BUCKET_BYTES = 32 * 2**20
"""Of the parameters that travel together; a larger one travels alone. Twice as much is needed while they do."""


@dataclass(frozen=True)
class Piece:
    """A parameter, this replica's part of its master, and how the parameter is cut."""

    parameter: torch.Tensor
    master: torch.Tensor
    cut: Cut


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
    """Round every replica's masters into the parameters of all. Collective.

    Args:
        bucket: parameters of one dtype and device, the same in the same order on every replica of ``group``.
    """
    parts = [piece.cut.parts(piece.parameter) for piece in bucket]  # by parameter, then by replica
    lengths = [sum(own[replica].numel() for own in parts) for replica in range(group.size)]
    mine = bucket[0].parameter.new_empty(max(lengths))
    _copy(_laid_out(mine, [own[group.rank] for own in parts]), [piece.master for piece in bucket])
    every = mine.new_empty(group.size * len(mine))
    dist.all_gather_single(every, mine, group=group.handle)
    for replica, flat in enumerate(every.split(len(mine))):
        theirs = [own[replica] for own in parts]
        _copy(theirs, _laid_out(flat, theirs))


def _laid_out(flat: torch.Tensor, shapes: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return views of ``flat``, one behind the other, of the shapes of these tensors."""
    views = flat[: sum(like.numel() for like in shapes)].split([like.numel() for like in shapes])
    return [view.view(like.shape) for view, like in zip(views, shapes, strict=True)]


def _copy(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    pairs = [(target, source) for target, source in zip(targets, sources, strict=True) if target.numel()]
    if pairs:
        torch._foreach_copy_([target for target, _ in pairs], [source for _, source in pairs])
