"""Gradient all-reduces in buckets (GradientBucket, reduce_gradients), and over tied-weight copies.

DeepSpeed's functions are not used because they do not support fp64.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist

from tds import torch_api
from tds.device import is_host
from tds.param_info import Tensor, info_of, set_info

BUCKET_BYTES = 32 * 2**20
"""Bucket size. A larger gradient is sent by itself."""
MIN_BUCKET_NUMEL, BUCKET_NUMEL_PER_REPLICA = 40_000_000, 1_000_000
"""Number of elements per bucket on an accelerator: the minimum, and the number per replica."""

T = TypeVar("T")
WIDE_DTYPES = (torch.float32, torch.float64)
"""Gradient dtypes that a single kernel can multiply without rounding the factor."""


class GradientSource(Protocol):
    """An engine's access to an optimizer's gradients.

    ``before_backward`` and ``after_backward`` surround each autograd run: a full backward, or either half of a split
    one. Between them, autograd may add to any parameter's ``grad``, even more than once (recompute, tied layers in one
    stage), and run its hooks. Between ``after_backward`` and the next ``before_backward``, gradients are only accessed
    through ``gradient_of``. Their all-reduces over the replicas start once no further backward adds to them.

    A source may have ``use_buckets(order)``, which the engine calls once with its ``BucketSchedule``. The source then
    stores gradients in those buckets, so that they are all-reduced in place. It returns a function that starts a
    bucket's reduce-scatter, or None if the engine is to all-reduce each bucket.

    A source that stores only its shards of the gradients has a ``backward_reduction``
    (``tds.micro_batch_reducer.BackwardReduction``), which the engine starts in every backward. ``use_buckets`` is then
    not called.

    Attributes:
        accumulates_in_hooks: the parameters' hooks store gradients before ``after_backward``, so that all-reduces may
            start during a backward.
        norm_is_scaled: the optimizer's norm includes the loss scale.
        supports_unfreezing: the optimizer also updates weights in its groups that are unfrozen after ``initialize``.
        scales_in_step: the optimizer multiplies gradients by its ``gradient_factor`` in its step. The norm is
            computed before that (``norm_of_sums``) and passed to the optimizer as ``raw_norm``, so that loss and norm
            are copied to the host together.
    """

    accumulates_in_hooks: bool
    norm_is_scaled: bool
    supports_unfreezing: bool
    scales_in_step: bool

    @property
    def clips_in_step(self) -> bool:
        """True if the optimizer computes the norm and clips in its step."""

    def gradient_of(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return the accumulated gradient; zeros if this rank has none, so that all ranks run the same collectives."""

    def loss_scale(self) -> float:
        """Return the factor by which each loss is multiplied before its backward."""

    def before_backward(self) -> None:
        """Hook that runs before each autograd run."""

    def after_backward(self) -> None:
        """Hook that runs after each autograd run."""

    def before_step(self) -> None:
        """Hook that runs when the global batch's gradients are complete, before the optimizer's step."""

    def after_step(self) -> None:
        """Hook that runs after the optimizer's step."""

    def discard(self) -> None:
        """Discard the gradients after a batch that ended without a step."""


def make_buckets(
    items: Iterable[T],
    num_bytes: Callable[[T], int] = attrgetter("nbytes"),
    key_of: Callable[[T], Hashable] = attrgetter("dtype"),
    limit: int | None = None,
) -> Iterator[list[T]]:
    """Yield ``items`` in buckets with one key and at most ``limit`` bytes or one item; empty items are skipped.

    Args:
        items: tensors, or objects that represent tensors to be sent.
        num_bytes: returns the size of an item.
        key_of: returns the dtype in which an item is sent, or another key that the items of a bucket share.
        limit: maximum bucket size (default ``BUCKET_BYTES``).
    """
    limit = BUCKET_BYTES if limit is None else limit
    by_key: dict[Hashable, list[T]] = {}
    for item in items:
        if num_bytes(item):
            by_key.setdefault(key_of(item), []).append(item)
    for same_key in by_key.values():
        bucket: list[T] = []
        size = 0
        for item in same_key:
            if bucket and size + num_bytes(item) > limit:
                yield bucket
                bucket, size = [], 0
            bucket.append(item)
            size += num_bytes(item)
        yield bucket


def choose_bucket_numel(device: torch.device, num_replicas: int, configured: int = 0) -> int | None:
    """Choose the number of elements per bucket; None if ``BUCKET_BYTES`` limits the size, as on a CPU.

    A ring all-reduce splits a bucket among the replicas. On an accelerator, the bucket grows with their number, so that
    each message is large enough for the network. On a CPU, the size is fixed: in gloo, the addition order depends
    on an element's position in the bucket, so with three or more replicas the results would depend on the bucket size.

    Args:
        configured: DeepSpeed's ``reduce_bucket_size`` or ``allgather_bucket_size``; 0 if not set.

    Source: Megatron-LM's distributed_data_parallel.py, whose default is ``max(40000000, 1000000 * dp)``.
    """
    if configured:
        return configured
    return None if is_host(device) else max(MIN_BUCKET_NUMEL, BUCKET_NUMEL_PER_REPLICA * num_replicas)


@dataclass(frozen=True)
class GradientBucket:
    """A running all-reduce; ``flat`` contains the concatenated, reduced ``gradients`` once ``work`` is done."""

    gradients: Sequence[torch.Tensor]
    flat: torch.Tensor
    work: Any

    @classmethod
    @torch.no_grad()
    def start_all_reduce(
        cls, gradients: Sequence[torch.Tensor], group: Any, dtype: torch.dtype | None = None
    ) -> GradientBucket:
        """Start one all-reduce over ``group`` for gradients with equal dtypes. Collective.

        The all-reduce is in place if the gradients are adjacent in memory; otherwise it runs on a copy.

        Args:
            dtype: dtype in which the gradients are sent and summed; None: the gradients' dtype.

        Raises:
            ValueError: a gradient is sparse.
        """
        check_not_sparse(gradients)
        run = contiguous_view(gradients)
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients]) if run is None else run
        flat = flat if dtype is None else flat.to(dtype)
        return cls(gradients, flat, dist.all_reduce(flat, group=group, async_op=True))

    @torch.no_grad()
    def wait(self, factor: float | torch.Tensor) -> None:
        """Wait for the all-reduce, multiply the result by ``factor`` and copy it into the gradients."""
        self.work.wait()
        multiply([self.flat], factor)
        for gradient, reduced in zip(self.gradients, self.flat.split([g.numel() for g in self.gradients]), strict=True):
            if reduced.data_ptr() != gradient.data_ptr():
                gradient.copy_(reduced.view_as(gradient))


def contiguous_view(tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """View adjacent ``tensors`` as one tensor; return None if they are not adjacent."""
    first = tensors[0]
    end = first.storage_offset()
    for tensor in tensors:
        is_next = tensor.storage_offset() == end and torch_api.shares_memory(first, tensor)
        if not is_next or not tensor.is_contiguous():
            return None
        end += tensor.numel()
    return first.as_strided((end - first.storage_offset(),), (1,))


def check_not_sparse(gradients: Iterable[torch.Tensor]) -> None:
    """Raise ValueError if a gradient is sparse."""
    if any(gradient.is_sparse for gradient in gradients):
        raise ValueError("sparse gradients are not supported. Build the embedding with sparse=False")


@torch.no_grad()
def multiply(gradients: Iterable[torch.Tensor], factor: float | torch.Tensor) -> None:
    """Multiply each gradient by ``factor`` in place."""
    if not isinstance(factor, torch.Tensor) and factor == 1.0:
        return
    tensors = list(gradients)
    dtypes = {gradient.dtype for gradient in tensors}
    if not dtypes <= set(WIDE_DTYPES) or (isinstance(factor, torch.Tensor) and len(dtypes) > 1):
        for gradient in tensors:  # on a CPU, a single kernel would first round the factor to 16 bits
            gradient.mul_(factor)
    elif tensors:
        torch_api.multiply_all(tensors, factor.to(tensors[0].dtype) if isinstance(factor, torch.Tensor) else factor)


def reduce_gradients(
    gradients: Sequence[torch.Tensor],
    group: Any,
    scale: float | torch.Tensor = 1.0,
    bucket_bytes: int | None = None,
) -> None:
    """Replace each gradient by its sum over ``group`` times ``scale``. Collective.

    Args:
        gradients: tensors with equal shapes and dtypes in the same order on every rank.
        group: a process group; None: no all-reduce (one replica).
        bucket_bytes: maximum size of a bucket, which has one dtype (default ``BUCKET_BYTES``).
    """
    if group is None or dist.get_world_size(group) == 1:
        multiply(gradients, scale)
        return
    check_not_sparse(gradients)  # before the first all-reduce
    runs = make_buckets(gradients, limit=bucket_bytes)
    for bucket in [GradientBucket.start_all_reduce(run, group) for run in runs]:
        bucket.wait(scale)


@torch.no_grad()
def reduce_tied_gradients(
    weights: Iterable[tuple[torch.Tensor, Any]], gradient_of: Any, dtype: torch.dtype | None = None
) -> None:
    """Sum each tied weight's gradients over the stages with a copy. Collective over each tied group.

    Args:
        weights: (parameter, group) pairs in the same order on every rank, see ``get_tied_weights_and_groups``.
        dtype: dtype in which gradients are sent and summed; None: the gradients' dtype.
    """
    for weight, group in weights:
        if weight.requires_grad and dist.get_world_size(group) > 1:
            gradient = gradient_of(weight)
            reduced = gradient if dtype is None else gradient.to(dtype)
            dist.all_reduce(reduced, group=group)
            if reduced is not gradient:
                gradient.copy_(reduced)


def set_reduced_by_optimizer(parameter: Tensor) -> Tensor:
    """Mark ``parameter`` as an expert weight, whose gradient is reduced by the optimizer instead of the engine."""
    return set_info(parameter, replace(info_of(parameter), is_expert=True))


def is_reduced_by_optimizer(parameter: torch.Tensor) -> bool:
    """Return True if the all-reduce over the replicas excludes the gradient of ``parameter`` (experts)."""
    return info_of(parameter).is_expert
