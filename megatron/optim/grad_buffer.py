"""GradBuffer: gradients in contiguous memory, bucket by bucket, summed over the replicas where they lie."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from megatron.mpu.groups import Group
from megatron.optim.zero.partition import VECTOR, ParamPartition
from megatron.torch_compat import reduce_scatter_single
from tds.grad_norm import accurate_dtype
from tds.gradient_reducer import Bucket, BucketSchedule
from tds.gradients import multiply, refuse_sparse
from tds.linear import add_product

# Gradients of a step, added up over its micro-batches where they are summed over the replicas.
#
# | layout | memory of a bucket, in the type of the sum | its sum |
# |---|---|---|
# | plain | one gradient behind the other, each in the shape of its parameter | an all-reduce in place |
# | slots | [d, rooms]: slot r holds replica r's part of each parameter | a reduce-scatter into this replica's slot |
# | ... and behind them what is not cut | one gradient behind the other | an all-reduce in place |
#
# Both are without a copy of the gradients: autograd's gradient of a weight is added into its place and freed, or a
# product adds there itself (``tds.linear``), with slots one for each length of a part, three at most. A bucket
# has memory from its first gradient of a step on, until the step is taken. A bucket of one weight takes over the memory
# of the first gradient where the layout is that of the weight, so that a large one is never there twice.
#
# Source: Megatron-LM's ``param_and_grad_buffer`` for the words ``main_grad`` and bucket; Rajbhandari et al. 2020,
# "ZeRO", section 5.1, for sums that leave each replica its part.

SCATTERS: bool | None = None
"""Whether ZeRO 1 reduce-scatters; None: on NCCL. gloo makes a reduce-scatter of an all-reduce, and that of whole
gradients in the buckets of ZeRO 0 has the bits of ZeRO 0."""


def scatters(group: Group) -> bool:
    """Return whether sums over ``group`` leave each replica its parts alone."""
    return dist.get_backend(group.handle) == "nccl" if SCATTERS is None else SCATTERS


class GradBuffer:
    """The gradients of parameters that one group of replicas shares, in the buckets of ``order``.

    Args:
        order: of all parameters; it may rearrange its buckets while no gradients are held.
        replicas: of these parameters.
        own_cut: with slots, how the replicas cut a parameter, None for one that is summed whole. None: the layout is
            plain.
    """

    def __init__(
        self,
        order: BucketSchedule,
        replicas: Group,
        own_cut: Callable[[torch.nn.Parameter], ParamPartition | None] | None = None,
    ) -> None:
        self.replicas = replicas
        self._order = order
        self._own_cut = own_cut
        self._layout: list[list[int]] = []
        self._buckets: dict[torch.Tensor, _BucketMemory] = {}
        self._is_held = False

    @property
    def is_scattered(self) -> bool:
        """Whether a replica has its parts of the sums alone."""
        return self._own_cut is not None

    @torch.no_grad()
    def add(self, parameter: torch.nn.Parameter) -> None:
        """Take the gradient that backward has left in ``parameter``, and free it.

        Raises:
            RuntimeError: the sum of its bucket has started.
            ValueError: it is sparse.
        """
        gradient, parameter.grad = parameter.grad, None
        if gradient is not None:
            refuse_sparse([gradient])
            self._bucket_of(parameter).add(parameter, gradient)

    def add_product(self, parameter: torch.nn.Parameter, rows: torch.Tensor, inputs: torch.Tensor) -> None:
        """Add ``rows^T inputs``, the gradient of ``parameter`` in a backward, by the product itself.

        Raises:
            RuntimeError: the sum of its bucket has started.
        """
        self._bucket_of(parameter).add_product(parameter, rows, inputs)

    def main_grad(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        """Return the gradient of ``parameter`` where it lies, zeros if none has come.

        With slots it is this replica's part of what is cut, in one run of memory; the sum once that is there.
        """
        return self._bucket_of(parameter).main_grad(parameter)

    @torch.no_grad()
    def start_reduce_scatter(self, bucket: Bucket) -> ScatteredBucket:
        """Start the sum of ``bucket``, which must have slots. Collective over the replicas."""
        memory = self._bucket_of(bucket[0])
        if [id(p) for p in memory.parameters] != [id(p) for p in bucket]:
            raise RuntimeError("parameters must not be frozen or unfrozen between the micro-batches of a step")
        for parameter in bucket:  # what has no hook, such as a weight unfrozen since
            self.add(parameter)
        return memory.start(self.replicas)

    def clear(self) -> None:
        """Forget all gradients and give their memory back; sums must be here."""
        for memory in self._buckets.values():
            memory.free()
        self._is_held = False

    def _bucket_of(self, parameter: torch.Tensor) -> _BucketMemory:
        if not self._is_held:
            self._is_held = True
            self._arrange()
        if parameter not in self._buckets:  # in no bucket: it is empty, or frozen
            self._buckets[parameter] = self._memory([parameter])
        return self._buckets[parameter]

    def _arrange(self) -> None:
        buckets = self._order.every()
        layout = [[id(parameter) for parameter in bucket] for bucket in buckets]
        if layout != self._layout:
            self._layout = layout
            self._buckets = {p: memory for memory in map(self._memory, buckets) for p in memory.parameters}

    def _memory(self, bucket: Sequence[Any]) -> _BucketMemory:
        cuts = {parameter: self._own_cut(parameter) if self._own_cut is not None else None for parameter in bucket}
        return _BucketMemory(cuts, self.replicas)


class _BucketMemory:
    """One bucket in one run of memory: the slots of what is cut, then the rest.

    Args:
        cuts: of its parameters, which have one type of sum and one device.
    """

    def __init__(self, cuts: dict[torch.nn.Parameter, ParamPartition | None], replicas: Group) -> None:
        self.parameters = list(cuts)
        self._cuts = cuts
        self._replicas = replicas.size
        self._rank = replicas.rank
        self._first: dict[torch.nn.Parameter, int] = {}  # number in a slot, or behind the slots
        self._rooms: dict[torch.nn.Parameter, int] = {}
        self._slot = self._rest = 0
        for parameter, cut in cuts.items():
            if cut is None:
                self._first[parameter], self._rest = self._rest, self._rest + parameter.numel()
            else:
                room = -(-cut.room(parameter) // VECTOR) * VECTOR  # so that each part begins at a whole vector
                self._first[parameter], self._slot = self._slot, self._slot + room
                self._rooms[parameter] = room
        self._number = self._replicas * self._slot + self._rest
        self._flat: torch.Tensor | None = None
        self._filled: set[torch.nn.Parameter] = set()
        self._is_summed = False

    @property
    def flat(self) -> torch.Tensor:
        """The memory of the bucket."""
        if self._flat is None:
            first = self.parameters[0]
            has_padding = self._number > sum(parameter.numel() for parameter in self.parameters)
            make = torch.zeros if has_padding else torch.empty
            self._flat = make(self._number, dtype=accurate_dtype(first.dtype), device=first.device)
        return self._flat

    @property
    def slots(self) -> torch.Tensor:
        """[d, rooms], what is cut."""
        return self.flat[: self._replicas * self._slot].view(self._replicas, self._slot)

    @property
    def rest(self) -> torch.Tensor:
        """What all replicas have whole."""
        return self.flat[self._replicas * self._slot :]

    def add(self, parameter: torch.nn.Parameter, gradient: torch.Tensor) -> None:
        self._refuse_if_summed(parameter)
        if parameter in self._filled:
            for parts, place in self._pairs(parameter, gradient):
                place.add_(parts)
            return
        self._filled.add(parameter)
        if self._can_be(parameter, gradient):
            self._flat = gradient.view(-1)
            return
        for parts, place in self._pairs(parameter, gradient):
            place.copy_(parts)

    def add_product(self, parameter: torch.nn.Parameter, rows: torch.Tensor, inputs: torch.Tensor) -> None:
        self._refuse_if_summed(parameter)
        is_first = parameter not in self._filled
        self._filled.add(parameter)
        cut, a, b = self._cuts[parameter], rows.t(), inputs  # [m, n], [n, k]
        if cut is None:
            every = [(a, b)]
        elif cut.dim == 0:
            every = [(of_a, b.expand(len(of_a), -1, -1)) for of_a in cut.parts(a)]
        else:
            every = [(a.expand(len(of_b), -1, -1), of_b) for of_b in cut.parts(b)]
        for (of_a, of_b), (_, place) in zip(every, self._pairs(parameter, parameter.detach()), strict=True):
            add_product(place, of_a, of_b, is_first=is_first)

    def main_grad(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        self._fill(parameter)
        first, cut = self._first[parameter], self._cuts[parameter]
        if cut is None:
            return self.rest[first : first + parameter.numel()].view(parameter.shape)
        shape = list(parameter.shape)
        shape[cut.dim] = cut.bounds[self._rank + 1] - cut.bounds[self._rank]
        return self.slots[self._rank, first : first + math.prod(shape)].view(shape)

    def start(self, group: Group) -> ScatteredBucket:
        for parameter in self.parameters:
            self._fill(parameter)
        self._is_summed = True
        works: list[Any] = []
        if self._slot:
            mine, every = self.slots[group.rank], self.slots.view(-1)
            works.append(reduce_scatter_single(mine, every, group=group.handle, async_op=True))
        if self._rest:
            works.append(dist.all_reduce(self.rest, group=group.handle, async_op=True))
        return ScatteredBucket([self.slots[group.rank], self.rest], _Works(works))

    def free(self) -> None:
        self._flat = None
        self._filled.clear()
        self._is_summed = False

    @torch.no_grad()
    def _fill(self, parameter: torch.nn.Parameter) -> None:
        """Let a gradient that has not come be 0."""
        if parameter not in self._filled:
            self._filled.add(parameter)
            for _, place in self._pairs(parameter, parameter.detach()):
                place.zero_()

    def _pairs(self, parameter: torch.nn.Parameter, whole: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield views of ``whole``, of the shape of ``parameter``, and of where they lie."""
        first, cut = self._first[parameter], self._cuts[parameter]
        if cut is None:
            yield whole, self.rest[first : first + whole.numel()].view(whole.shape)
        else:
            yield from cut.pairs(whole, self.slots[:, first : first + self._rooms[parameter]])

    def _refuse_if_summed(self, parameter: torch.nn.Parameter) -> None:
        if self._is_summed:
            raise RuntimeError(
                "backward must leave the gradient of a weight once, got one of shape "
                f"{tuple(parameter.shape)} when its sum over the replicas had started. Recompute with "
                "use_reentrant=False, or add --no-overlap-grad-reduce"
            )

    def _can_be(self, parameter: torch.nn.Parameter, gradient: torch.Tensor) -> bool:
        """Return whether the memory of ``gradient`` is that of this bucket as it should lie."""
        cut = self._cuts[parameter]
        is_alone = len(self.parameters) == 1 and self._flat is None and self._number == gradient.numel()
        is_in_order = cut is None or cut.dim == 0
        return (
            is_alone and is_in_order and gradient.dtype == accurate_dtype(gradient.dtype) and gradient.is_contiguous()
        )


@dataclass(frozen=True)
class _Works:
    """Several messages on their way."""

    works: Sequence[Any]

    def wait(self) -> None:
        for work in self.works:
            work.wait()


@dataclass(frozen=True)
class ScatteredBucket:
    """A sum on its way of which this replica gets its own part: ``gradients`` hold it once ``work`` is done."""

    gradients: Sequence[torch.Tensor]
    work: _Works

    def wait(self, factor: float | torch.Tensor) -> None:
        """Wait for the sum and multiply it by ``factor``."""
        self.work.wait()
        multiply([gradient for gradient in self.gradients if gradient.numel()], factor)
