"""Gradients reduce-scattered within backward."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from megatron.mpu.groups import Group
from megatron.mpu.shard import Shard, shard_of
from megatron.optim.param_store import MainParams
from megatron.optim.zero.partition import ParamPartition
from megatron.torch_compat import reduce_scatter_single
from tds.grad_norm import accurate_dtype
from tds.gradient_reducer import AgreedOrder, Bucket
from tds.gradients import multiply

# Sums of gradients over the replicas of which each replica keeps its parts.
#
# | backend | what is sent of n bytes | the sum |
# |---|---|---|
# | NCCL | a reduce-scatter, n (d - 1) / d; an all-reduce of what all replicas keep whole | its own order of additions |
# | others | an all-reduce, twice as much | that of ZeRO 0 to the bit, in the same buckets |
#
# What is kept whole (single numbers) is never scattered: each replica's sum of it would be added up in another order,
# and the copies of the weight would drift apart.
#
# gloo makes a reduce-scatter of an all-reduce, so nothing is lost there.


@dataclass(frozen=True)
class GradientShard:
    """This replica's gradient of a parameter (None: it has none), and how the sum is cut over the replicas."""

    gradient: torch.Tensor | None
    parameter: torch.nn.Parameter
    cut: ParamPartition | None

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

    def __init__(self, shares: Sequence[GradientShard], group: Group, *, is_scattered: bool | None = None) -> None:
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

    shares: Sequence[GradientShard]
    group: Group
    flat: torch.Tensor
    work: Any
    is_scattered: bool

    @classmethod
    def start(cls, shares: Sequence[GradientShard], group: Group, *, is_scattered: bool) -> _Run:
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


def _in_one_run(shares: Sequence[GradientShard]) -> torch.Tensor:
    """Return all gradients one behind the other, in the type of the sum."""
    numbers = [share.parameter.numel() for share in shares]
    flat = torch.zeros(sum(numbers), dtype=shares[0].dtype, device=shares[0].parameter.device)
    for share, place in zip(shares, flat.split(numbers), strict=True):
        if share.gradient is not None:
            place.view(share.parameter.shape).copy_(share.gradient)
    return flat


def _in_slots(shares: Sequence[GradientShard], replicas: int) -> torch.Tensor:
    """Return [d, rooms]: for each replica its parts of all gradients."""
    rooms = [share.room(replicas) for share in shares]
    every = torch.zeros(replicas, sum(rooms), dtype=shares[0].dtype, device=shares[0].parameter.device)
    for share, places in zip(shares, every.split(rooms, dim=1), strict=True):
        if share.gradient is None:
            continue
        assert share.cut is not None  # the others are summed whole
        for parts, place in share.cut.pairs(share.gradient, places):
            place.copy_(parts)
    return every


# ZeRO 2: gradients are summed over the replicas within backward, and each replica keeps its parts of them alone.
#
# A bucket of weights is summed as soon as backward has left the gradient of each, while it goes on; the sum of one
# bucket is on its way at a time. What a replica keeps is the sum over micro-batches of its parts, in fp32. So a step
# holds 4 / d bytes of gradients for a parameter, a bucket or two more, and what backward has left in a bucket that is
# not full yet.
#
# Every micro-batch is summed by itself, as DeepSpeed does: to wait for the last one would keep whole gradients, which
# is what this stage is there to avoid. With one micro-batch a step the sums are those of ZeRO 0 to the bit where the
# replicas' sums are (above); with several the additions come in another order.
#
# Buckets are those in which ZeRO 0 sums, and all replicas sum them in one order (``AgreedOrder``); what backward
# does not reach is summed at its end, with zeros for what is missing.
#
# Source: Rajbhandari et al. 2020, "ZeRO: memory optimizations toward training trillion parameter models", section 5.2.


class PartitionedGradients:
    """The parts that this replica keeps of the gradients of all parameters."""

    are_summed = True

    def __init__(self, masters: MainParams) -> None:
        self._masters = masters
        self.holders = masters.data_group
        self._parts: dict[torch.nn.Parameter, torch.Tensor] = {}
        self._arrived: dict[torch.Tensor, torch.Tensor | None] = {}
        self._order = AgreedOrder(self.holders.handle, masters.bucket_numbers)
        self._pending: Sum | None = None

    def register(self, parameter: torch.nn.Parameter) -> None:
        parameter.register_post_accumulate_grad_hook(self._take)
        self._order.register(parameter)

    def of(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        if parameter not in self._parts:
            dtype = accurate_dtype(parameter.dtype)
            self._parts[parameter] = torch.zeros_like(self._view(parameter), dtype=dtype).contiguous()
        return self._parts[parameter]

    def shard(self, parameter: torch.nn.Parameter) -> Shard:
        return shard_of(self._masters.of[parameter])

    def part(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        return self.of(parameter)

    def is_counted_in_norm(self, parameter: torch.nn.Parameter) -> bool:
        return self._masters.is_cut(parameter) or self.holders.rank == 0

    def begin_last_backward(self) -> None:
        """Every backward is summed, the last one as the others."""

    @torch.no_grad()
    def end_micro_batch(self) -> None:
        """Sum what is left, and have all sums here. Collective over the replicas."""
        self._sum(self._order.rest())
        self._wait()
        self._order.reset()

    def finish(self, factor: float) -> None:
        multiply(self._parts.values(), factor)

    def clear(self) -> None:
        """Forget all gradients, those of a backward that broke off too."""
        self._wait()
        self._parts.clear()
        self._arrived.clear()
        self._order.reset()

    @torch.no_grad()
    def _take(self, parameter: torch.Tensor) -> None:
        """Take the gradient that backward has just left in ``parameter``."""
        if not parameter.numel():  # it is in no bucket
            return
        if parameter in self._arrived or self._order.is_taken(parameter):
            raise RuntimeError(
                "backward must leave the gradient of a weight once for each micro-batch, got one of shape "
                f"{tuple(parameter.shape)} twice: under --zero-stage 2 and 3 its sum over the replicas may be on its "
                "way. Recompute with use_reentrant=False, or use --zero-stage 1"
            )
        self._arrived[parameter], parameter.grad = parameter.grad, None
        self._sum(self._order.arrived(parameter))

    def _sum(self, buckets: Iterable[Bucket]) -> None:
        """Let ``buckets`` be summed; before each the one ahead of it is here."""
        for bucket in buckets:
            self._wait()
            shares = [GradientShard(self._arrived.pop(p, None), p, self._masters.cut(p)) for p in bucket]
            self._pending = Sum(shares, self.holders)

    def _wait(self) -> None:
        """Wait for the sum that is on its way, and keep this replica's parts of it."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        for parameter, part in pending.parts():
            if parameter in self._parts:
                self._parts[parameter].add_(part)
            else:
                self._parts[parameter] = part

    def _view(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        cut = self._masters.cut(parameter)
        return parameter if cut is None else cut.part(parameter.detach(), self.holders.rank)
