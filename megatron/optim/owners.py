"""Sums of gradients over the replicas of which each replica keeps its parts.

| backend | what is sent of n bytes | the sum |
|---|---|---|
| NCCL | a reduce-scatter, n (d - 1) / d; an all-reduce of what all replicas keep whole | its own order of additions |
| others | an all-reduce, twice as much | that of ZeRO 0 to the bit, in the same buckets |

What is kept whole (single numbers) is never scattered: each replica's sum of it would be added up in another order, and
the copies of the weight would drift apart.

gloo makes a reduce-scatter of an all-reduce, so nothing is lost there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from megatron.mpu.grads import accurate_dtype
from megatron.mpu.groups import Group
from megatron.optim.cuts import Cut
from megatron.torch_compat import reduce_scatter_single


@dataclass(frozen=True)
class Share:
    """This replica's gradient of a parameter (None: it has none), and how the sum is cut over the replicas."""

    gradient: torch.Tensor | None
    parameter: torch.nn.Parameter
    cut: Cut | None

    @property
    def dtype(self) -> torch.dtype:
        """The type in which the sum is taken."""
        return accurate_dtype(self.parameter.dtype)

    def slot(self, replica: int) -> tuple[int, ...]:
        """Return the shape of one replica's part."""
        shape = list(self.parameter.shape)
        if self.cut is not None:
            shape[self.cut.dim] = self.cut.bounds[replica + 1] - self.cut.bounds[replica]
        return tuple(shape)

    def room(self, replicas: int) -> int:
        """Numbers of the largest part."""
        return max(torch.Size(self.slot(replica)).numel() for replica in range(replicas))

    def of(self, whole: torch.Tensor, replica: int) -> torch.Tensor:
        """Return the view of one replica's part of ``whole``."""
        return whole if self.cut is None else self.cut.part(whole, replica)


class Sum:
    """A sum on its way, in one run of numbers or two.

    Args:
        is_scattered: by a reduce-scatter; None: as the backend likes it.
    """

    def __init__(self, shares: Sequence[Share], group: Group, *, is_scattered: bool | None = None) -> None:
        """Start the sum of ``shares`` of one dtype. Collective: the same parameters in the same order on every rank."""
        if is_scattered is None:
            is_scattered = dist.get_backend(group.handle) == "nccl"
        kinds = [(shares, False)]
        if is_scattered:
            kinds = [([s for s in shares if s.cut is not None], True), ([s for s in shares if s.cut is None], False)]
        self._runs = [_Run.start(some, group, is_scattered=scatters) for some, scatters in kinds if some]

    def parts(self) -> Iterator[tuple[torch.nn.Parameter, torch.Tensor]]:
        """Wait for the sum; yield each parameter and this replica's part in memory of its own."""
        for run in self._runs:
            yield from run.parts()


@dataclass
class _Run:
    """``flat`` holds the sum once ``work`` is done."""

    shares: Sequence[Share]
    group: Group
    flat: torch.Tensor
    work: Any
    is_scattered: bool

    @classmethod
    def start(cls, shares: Sequence[Share], group: Group, *, is_scattered: bool) -> _Run:
        if is_scattered:
            every = _in_slots(shares, group.size)
            mine = every.new_empty(every.shape[1])
            work = reduce_scatter_single(mine, every.view(-1), group=group.handle, async_op=True)
            return cls(shares, group, mine, work, True)
        flat = _in_one_run(shares)
        return cls(shares, group, flat, dist.all_reduce(flat, group=group.handle, async_op=True), False)

    def parts(self) -> Iterator[tuple[torch.nn.Parameter, torch.Tensor]]:
        self.work.wait()
        start = 0
        for share in self.shares:
            shape = share.slot(self.group.rank)
            if self.is_scattered:
                number = share.room(self.group.size)
                part = self.flat[start : start + torch.Size(shape).numel()].view(shape)
            else:
                number = share.parameter.numel()
                part = share.of(self.flat[start : start + number].view(share.parameter.shape), self.group.rank)
            yield share.parameter, part.clone(memory_format=torch.contiguous_format)  # a view would keep all of them
            start += number


def _in_one_run(shares: Sequence[Share]) -> torch.Tensor:
    """Return all gradients one behind the other, in the type of the sum."""
    numbers = [share.parameter.numel() for share in shares]
    flat = torch.zeros(sum(numbers), dtype=shares[0].dtype, device=shares[0].parameter.device)
    for share, place in zip(shares, flat.split(numbers), strict=True):
        if share.gradient is not None:
            place.view(share.parameter.shape).copy_(share.gradient)
    return flat


def _in_slots(shares: Sequence[Share], replicas: int) -> torch.Tensor:
    """Return [d, rooms]: for each replica its parts of all gradients."""
    rooms = [share.room(replicas) for share in shares]
    every = torch.zeros(replicas, sum(rooms), dtype=shares[0].dtype, device=shares[0].parameter.device)
    for share, places in zip(shares, every.split(rooms, dim=1), strict=True):
        if share.gradient is None:
            continue
        assert share.cut is not None  # the others are summed whole
        for first, number, length in share.cut.runs:  # one copy for all parts of a length
            run = share.gradient.narrow(share.cut.dim, share.cut.bounds[first], number * length)
            parts = run.unflatten(share.cut.dim, (number, length)).movedim(share.cut.dim, 0)
            places[first : first + number, : parts[0].numel()].view(parts.shape).copy_(parts)
    return every
