"""GradBuffer: gradients accumulated in contiguous buckets, where they are summed over the replicas.

| layout | memory of a bucket, in the dtype of the sum | its sum |
|---|---|---|
| plain | the gradients one after the other, each in the shape of its parameter | an all-reduce in place |
| slots | [d, slot]: row r contains replica r's shard of each gradient | a reduce-scatter into this replica's row |
| after the slots | unsharded gradients, one after the other | an all-reduce in place |

Gradients are not copied: autograd's gradient of a weight is added to the bucket and freed, or a fused layer adds its
product there (``tds.linear_function``). With slots, the shards of a weight have at most three different lengths; the
layer adds one product for each length. The memory of a bucket is allocated at its first gradient in a step and freed
after the step. A bucket of one weight takes over the memory of the first gradient if the layouts agree, so that a large
gradient never exists twice.

Source: Megatron-LM's ``param_and_grad_buffer`` for the terms ``main_grad`` and bucket; Rajbhandari et al. 2020, "ZeRO",
section 5.1, for reduce-scattered gradients.
"""

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
from tds.bucket_reducer import Bucket, BucketSchedule
from tds.grad_norm import accurate_dtype
from tds.gradients import check_not_sparse, multiply
from tds.linear_function import add_product

USE_REDUCE_SCATTER: bool | None = None
"""True if ZeRO 1 reduce-scatters gradients; None: on NCCL only.

gloo implements a reduce-scatter by an all-reduce. With gloo, ZeRO 1 therefore all-reduces full gradients in the buckets
of ZeRO 0, and its results are bitwise equal to those of ZeRO 0.
"""


def uses_reduce_scatter(group: Group) -> bool:
    """Return True if ZeRO 1 reduce-scatters gradients over ``group`` rather than all-reducing them."""
    return dist.get_backend(group.handle) == "nccl" if USE_REDUCE_SCATTER is None else USE_REDUCE_SCATTER


class GradBuffer:
    """Gradients in the buckets of ``order``, for parameters replicated over the same ranks.

    Args:
        order: the buckets of all parameters. ``order`` may rearrange buckets only while the buffer is empty.
        replicas: group of the replicas.
        partition_of: function that maps a parameter in slots to its partition, and an all-reduced parameter to None.
            Without this function all buckets have the plain layout.
    """

    def __init__(
        self,
        order: BucketSchedule,
        replicas: Group,
        partition_of: Callable[[torch.nn.Parameter], ParamPartition | None] | None = None,
    ) -> None:
        self.replicas = replicas
        self._order = order
        self._partition_of = partition_of
        self._layout: list[list[int]] = []
        self._buckets: dict[torch.Tensor, _BucketMemory] = {}
        self._is_in_use = False

    @property
    def is_scattered(self) -> bool:
        """True if gradients are reduce-scattered, so that a replica keeps only its shards of the sums."""
        return self._partition_of is not None

    @torch.no_grad()
    def add(self, parameter: torch.nn.Parameter) -> None:
        """Add ``parameter.grad``, if any, and free it.

        Raises:
            RuntimeError: the reduction of its bucket has started.
            ValueError: the gradient is sparse.
        """
        gradient, parameter.grad = parameter.grad, None
        if gradient is not None:
            check_not_sparse([gradient])
            self._bucket_of(parameter).add(parameter, gradient)

    def add_product(self, parameter: torch.nn.Parameter, rows: torch.Tensor, inputs: torch.Tensor) -> None:
        """Add ``rows^T inputs``, a fused layer's gradient for ``parameter``, without materializing it.

        Raises:
            RuntimeError: the reduction of its bucket has started.
        """
        self._bucket_of(parameter).add_product(parameter, rows, inputs)

    def main_grad(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        """Return the accumulated gradient in the buffer, zeros if there is none.

        With slots, the result is this replica's shard, contiguous. It contains the sum over the replicas after the
        bucket's reduce-scatter.
        """
        return self._bucket_of(parameter).main_grad(parameter)

    @torch.no_grad()
    def start_reduce_scatter(self, bucket: Bucket) -> ScatteredBucket:
        """Start the reduce-scatter of ``bucket``, which has slots. Collective over the replicas."""
        memory = self._bucket_of(bucket[0])
        if [id(p) for p in memory.parameters] != [id(p) for p in bucket]:
            raise RuntimeError("parameters must not be frozen or unfrozen between the micro-batches of a step")
        for parameter in bucket:  # in case a parameter has no hook, for example because it was unfrozen later
            self.add(parameter)
        return memory.start(self.replicas)

    def clear(self) -> None:
        """Discard all gradients and free their memory; no reduction may be running."""
        for memory in self._buckets.values():
            memory.free()
        self._is_in_use = False

    def _bucket_of(self, parameter: torch.Tensor) -> _BucketMemory:
        if not self._is_in_use:
            self._is_in_use = True
            self._arrange()
        if parameter not in self._buckets:  # empty and frozen parameters are in no bucket of ``order``
            self._buckets[parameter] = self._make_memory([parameter])
        return self._buckets[parameter]

    def _arrange(self) -> None:
        buckets = self._order.all_buckets()
        layout = [[id(parameter) for parameter in bucket] for bucket in buckets]
        if layout != self._layout:
            self._layout = layout
            self._buckets = {p: memory for memory in map(self._make_memory, buckets) for p in memory.parameters}

    def _make_memory(self, bucket: Sequence[Any]) -> _BucketMemory:
        partition_of = self._partition_of or (lambda parameter: None)
        return _BucketMemory({parameter: partition_of(parameter) for parameter in bucket}, self.replicas)


class _BucketMemory:
    """The memory of one bucket: the slots of sharded gradients, then the unsharded ones.

    Args:
        partitions: partition of each parameter. All parameters share a device and an accumulation dtype.
    """

    def __init__(self, partitions: dict[torch.nn.Parameter, ParamPartition | None], replicas: Group) -> None:
        self.parameters = list(partitions)
        self._partitions = partitions
        self._num_replicas = replicas.size
        self._rank = replicas.rank
        self._offsets: dict[torch.nn.Parameter, int] = {}  # within a row of the slots, or within ``unsharded``
        self._slot_numels: dict[torch.nn.Parameter, int] = {}
        self._row_numel = self._unsharded_numel = 0
        for parameter, partition in partitions.items():
            if partition is None:
                self._offsets[parameter] = self._unsharded_numel
                self._unsharded_numel += parameter.numel()
            else:
                numel = -(-partition.slot_numel(parameter) // VECTOR) * VECTOR  # shards start at a full vector
                self._offsets[parameter], self._slot_numels[parameter] = self._row_numel, numel
                self._row_numel += numel
        self._numel = self._num_replicas * self._row_numel + self._unsharded_numel
        self._flat: torch.Tensor | None = None
        self._filled: set[torch.nn.Parameter] = set()
        self._is_summed = False

    @property
    def flat(self) -> torch.Tensor:
        if self._flat is None:
            first = self.parameters[0]
            has_padding = self._numel > sum(parameter.numel() for parameter in self.parameters)
            allocate = torch.zeros if has_padding else torch.empty
            self._flat = allocate(self._numel, dtype=accurate_dtype(first.dtype), device=first.device)
        return self._flat

    @property
    def slots(self) -> torch.Tensor:
        """[d, slot], the sharded gradients."""
        return self.flat[: self._num_replicas * self._row_numel].view(self._num_replicas, self._row_numel)

    @property
    def unsharded(self) -> torch.Tensor:
        """The gradients that every replica keeps in full."""
        return self.flat[self._num_replicas * self._row_numel :]

    def add(self, parameter: torch.nn.Parameter, gradient: torch.Tensor) -> None:
        self._raise_if_summed(parameter)
        if parameter in self._filled:
            for values, target in self._pairs(parameter, gradient):
                target.add_(values)
            return
        self._filled.add(parameter)
        if self._can_take_over(parameter, gradient):
            self._flat = gradient.view(-1)
            return
        for values, target in self._pairs(parameter, gradient):
            target.copy_(values)

    def add_product(self, parameter: torch.nn.Parameter, rows: torch.Tensor, inputs: torch.Tensor) -> None:
        self._raise_if_summed(parameter)
        is_first = parameter not in self._filled
        self._filled.add(parameter)
        partition, a, b = self._partitions[parameter], rows.t(), inputs  # [m, n], [n, k]
        if partition is None:
            factors = [(a, b)]
        elif partition.dim == 0:
            factors = [(a_shards, b.expand(len(a_shards), -1, -1)) for a_shards in partition.slices(a)]
        else:
            factors = [(a.expand(len(b_shards), -1, -1), b_shards) for b_shards in partition.slices(b)]
        for (a_shards, b_shards), (_, target) in zip(factors, self._pairs(parameter, parameter.detach()), strict=True):
            add_product(target, a_shards, b_shards, is_first=is_first)

    def main_grad(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        self._fill(parameter)
        offset, partition = self._offsets[parameter], self._partitions[parameter]
        if partition is None:
            return self.unsharded[offset : offset + parameter.numel()].view(parameter.shape)
        shape = list(parameter.shape)
        shape[partition.dim] = partition.bounds[self._rank + 1] - partition.bounds[self._rank]
        return self.slots[self._rank, offset : offset + math.prod(shape)].view(shape)

    def start(self, group: Group) -> ScatteredBucket:
        for parameter in self.parameters:
            self._fill(parameter)
        self._is_summed = True
        works: list[Any] = []
        if self._row_numel:
            local, rows = self.slots[group.rank], self.slots.view(-1)
            works.append(reduce_scatter_single(local, rows, group=group.handle, async_op=True))
        if self._unsharded_numel:
            works.append(dist.all_reduce(self.unsharded, group=group.handle, async_op=True))
        return ScatteredBucket([self.slots[group.rank], self.unsharded], _Works(works))

    def free(self) -> None:
        self._flat = None
        self._filled.clear()
        self._is_summed = False

    @torch.no_grad()
    def _fill(self, parameter: torch.nn.Parameter) -> None:
        """Set a missing gradient to zeros."""
        if parameter not in self._filled:
            self._filled.add(parameter)
            for _, target in self._pairs(parameter, parameter.detach()):
                target.zero_()

    def _pairs(self, parameter: torch.nn.Parameter, full: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield paired views of the same elements in ``full`` (in the parameter's shape) and in the bucket."""
        offset, partition = self._offsets[parameter], self._partitions[parameter]
        if partition is None:
            yield full, self.unsharded[offset : offset + full.numel()].view(full.shape)
        else:
            yield from partition.pairs(full, self.slots[:, offset : offset + self._slot_numels[parameter]])

    def _raise_if_summed(self, parameter: torch.nn.Parameter) -> None:
        if self._is_summed:
            raise RuntimeError(
                "backward must compute the gradient of a weight once, got another one of shape "
                f"{tuple(parameter.shape)} after its reduction over the replicas had started. Recompute with "
                "use_reentrant=False, or add --no-overlap-grad-reduce"
            )

    def _can_take_over(self, parameter: torch.nn.Parameter, gradient: torch.Tensor) -> bool:
        partition = self._partitions[parameter]
        is_single = len(self.parameters) == 1 and self._flat is None and self._numel == gradient.numel()
        is_in_order = partition is None or partition.dim == 0
        is_accurate = gradient.dtype == accurate_dtype(gradient.dtype)
        return is_single and is_in_order and is_accurate and gradient.is_contiguous()


@dataclass(frozen=True)
class _Works:
    """Several running collectives."""

    works: Sequence[Any]

    def wait(self) -> None:
        for work in self.works:
            work.wait()


@dataclass(frozen=True)
class ScatteredBucket:
    """A running reduce-scatter of a bucket: ``gradients`` contain this replica's shards once ``work`` is done."""

    gradients: Sequence[torch.Tensor]
    work: _Works

    def wait(self, factor: float | torch.Tensor) -> None:
        """Wait for the reduce-scatter and multiply its result by ``factor``."""
        self.work.wait()
        multiply([gradient for gradient in self.gradients if gradient.numel()], factor)
