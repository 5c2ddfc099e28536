"""GradientBucket and reduce_gradients: all-reduces of gradients in buckets; the all-reduce of tied weights.

DeepSpeed's functions do not support fp64.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist

from tds import torch_api
from tds.device import is_host
from tds.param_info import Tensor, info_of, set_info

BUCKET_BYTES = 32 * 2**20
"""Size of a bucket. A larger gradient is sent by itself."""
LEAST_BUCKET, BUCKET_OF_REPLICA = 40_000_000, 1_000_000
"""Elements of a bucket on a device: the minimum, and the number per replica."""

T = TypeVar("T")
WIDE = (torch.float32, torch.float64)
"""Dtypes in which gradients are summed."""


class GradientSource(Protocol):
    """Access of an engine to an optimizer's gradients.

    ``before_backward`` and ``after_backward`` surround each run of autograd: a full backward, or either half of a split
    one. Between them autograd may add to any parameter's ``grad``, also more than once (recompute, tied layers in one
    stage), and run its hooks. Between ``after_backward`` and the next ``before_backward`` gradients are only accessed
    through ``of``, from which sums over replicas may start once no backward will add to a gradient any more.

    A source may have ``use_buckets(order)``, called once with the engine's ``BucketSchedule``. It then stores gradients
    in those buckets, so that they are summed in place. It returns a function that starts the reduce-scatter of a
    bucket, or None if the engine all-reduces each bucket.

    Attributes:
        come_in_hooks: the parameter's hooks store a gradient before ``after_backward``, so that sums may start within
            a backward.
        norm_is_scaled: the optimizer's norm includes the loss scale.
        takes_unfrozen: the optimizer updates all weights of its groups, also those unfrozen after ``initialize``.
        are_multiplied_in_step: the optimizer multiplies by its ``gradient_factor`` in its own step and computes the
            norm before that (``norm_of_sums``, returned to it as ``raw_norm``), so that loss and norm are copied to the
            host together.
    """

    come_in_hooks: bool
    norm_is_scaled: bool
    takes_unfrozen: bool
    are_multiplied_in_step: bool

    @property
    def clips_itself(self) -> bool:
        """True if the optimizer computes the norm and clips in its own step."""

    def of(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return the accumulated gradient, zeros if this rank has none, so that all ranks agree."""

    def loss_scale(self) -> float:
        """Return the factor by which each loss is multiplied before its backward."""

    def before_backward(self) -> None:
        """Called before each run of autograd."""

    def after_backward(self) -> None:
        """Called after each run of autograd."""

    def before_step(self) -> None:
        """Called when the gradients of the global batch are complete, before the optimizer's step."""

    def after_step(self) -> None:
        """Called after the optimizer's step."""

    def forget(self) -> None:
        """Discard the gradients of a batch without a step."""


def buckets(
    items: Iterable[T],
    num_bytes: Callable[[T], int] = attrgetter("nbytes"),
    dtype_of: Callable[[T], torch.dtype] = attrgetter("dtype"),
    limit: int | None = None,
) -> Iterator[list[T]]:
    """Yield ``items`` in buckets of one dtype, each of at most ``limit`` bytes or of one item; empty items are skipped.

    Args:
        items: tensors, or objects that stand for tensors to be sent.
        num_bytes, dtype_of: return the size and dtype of an item as it is sent.
        limit: None for ``BUCKET_BYTES``.
    """
    limit = BUCKET_BYTES if limit is None else limit
    by_dtype: dict[torch.dtype, list[T]] = {}
    for item in items:
        if num_bytes(item):
            by_dtype.setdefault(dtype_of(item), []).append(item)
    for same in by_dtype.values():
        bucket: list[T] = []
        size = 0
        for item in same:
            if bucket and size + num_bytes(item) > limit:
                yield bucket
                bucket, size = [], 0
            bucket.append(item)
            size += num_bytes(item)
        yield bucket


def bucket_numbers(place: torch.device, replicas: int, asked: int = 0) -> int | None:
    """Return the number of elements of a bucket; None if ``BUCKET_BYTES`` limits it, as on a CPU.

    A ring splits a bucket among the replicas. On a device the bucket grows with their number, so that each message is
    large enough for the network. In gloo the order of additions depends on an element's position in the bucket, so that
    on a CPU other bucket sizes would give other bits with three replicas or more.

    Args:
        asked: DeepSpeed's ``reduce_bucket_size`` or ``allgather_bucket_size``; 0 if not set.

    Source: Megatron-LM's distributed_data_parallel.py, whose default is ``max(40000000, 1000000 * dp)``.
    """
    if asked:
        return asked
    return None if is_host(place) else max(LEAST_BUCKET, BUCKET_OF_REPLICA * replicas)


@dataclass(frozen=True)
class GradientBucket:
    """A running all-reduce: ``flat`` contains the summed ``gradients``, concatenated, once ``work`` is done."""

    gradients: Sequence[torch.Tensor]
    flat: torch.Tensor
    work: Any

    @classmethod
    @torch.no_grad()
    def start_all_reduce(
        cls, gradients: Sequence[torch.Tensor], group: Any, dtype: torch.dtype | None = None
    ) -> GradientBucket:
        """Start the sum of gradients of one dtype over ``group``, in one message. Collective.

        It is in place if the gradients are adjacent in memory, and otherwise in a copy.

        Args:
            dtype: dtype in which they are sent and summed; None for their own.

        Raises:
            ValueError: one of them is sparse.
        """
        refuse_sparse(gradients)
        run = one_run(gradients)
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients]) if run is None else run
        flat = flat if dtype is None else flat.to(dtype)
        return cls(gradients, flat, dist.all_reduce(flat, group=group, async_op=True))

    @torch.no_grad()
    def wait(self, factor: float | torch.Tensor) -> None:
        """Wait for the sum, multiply it by ``factor`` and copy it into the gradients."""
        self.work.wait()
        multiply([self.flat], factor)
        for gradient, part in zip(self.gradients, self.flat.split([g.numel() for g in self.gradients]), strict=True):
            if part.data_ptr() != gradient.data_ptr():
                gradient.copy_(part.view_as(gradient))


def one_run(tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Return a view of the memory of all ``tensors`` if they are adjacent, otherwise None."""
    first = tensors[0]
    end = first.storage_offset()
    for tensor in tensors:
        is_next = tensor.storage_offset() == end and torch_api.shares_memory(first, tensor)
        if not is_next or not tensor.is_contiguous():
            return None
        end += tensor.numel()
    return first.as_strided((end - first.storage_offset(),), (1,))


def refuse_sparse(gradients: Iterable[torch.Tensor]) -> None:
    """Raise ValueError if one of ``gradients`` is sparse."""
    if any(gradient.is_sparse for gradient in gradients):
        raise ValueError("sparse gradients cannot be reduced, got one; build the embedding with sparse=False")


@torch.no_grad()
def multiply(gradients: Iterable[torch.Tensor], factor: float | torch.Tensor) -> None:
    """Multiply each gradient by ``factor`` in place."""
    if not isinstance(factor, torch.Tensor) and factor == 1.0:
        return
    held = list(gradients)
    types = {gradient.dtype for gradient in held}
    if not types <= set(WIDE) or (isinstance(factor, torch.Tensor) and len(types) > 1):
        for gradient in held:  # one kernel for all would round the factor to their 16 bits first, on a CPU
            gradient.mul_(factor)
    elif held:
        torch_api.multiply_all(held, factor.to(held[0].dtype) if isinstance(factor, torch.Tensor) else factor)


def reduce_gradients(
    gradients: Sequence[torch.Tensor],
    group: Any,
    scale: float | torch.Tensor = 1.0,
    bucket_bytes: int | None = None,
) -> None:
    """Replace each gradient by the sum over ``group`` times ``scale``. Collective.

    Args:
        gradients: the same shapes and dtypes in the same order on every rank.
        group: a process group, or None for no sum at all (one replica).
        bucket_bytes: gradients of one dtype are sent together up to this size; None for ``BUCKET_BYTES``.
    """
    if group is None or dist.get_world_size(group) == 1:
        multiply(gradients, scale)
        return
    refuse_sparse(gradients)  # before the first sum
    runs = buckets(gradients, limit=bucket_bytes)
    for bucket in [GradientBucket.start_all_reduce(run, group) for run in runs]:
        bucket.wait(scale)


@torch.no_grad()
def sum_tied(weights: Iterable[tuple[torch.Tensor, Any]], gradient_of: Any, dtype: torch.dtype | None = None) -> None:
    """Sum the gradients of each tied weight over the stages with a copy. Collective over each tied group.

    Args:
        weights: (parameter, group) pairs in the same order on every rank, as of ``get_tied_weights_and_groups``.
        dtype: dtype in which gradients are sent and summed; None for their own.
    """
    for weight, group in weights:
        if weight.requires_grad and dist.get_world_size(group) > 1:
            gradient = gradient_of(weight)
            summed = gradient if dtype is None else gradient.to(dtype)
            dist.all_reduce(summed, group=group)
            if summed is not gradient:
                gradient.copy_(summed)


def set_reduced_apart(parameter: Tensor) -> Tensor:
    """Record that ``parameter`` is a weight of an expert: the optimizer reduces its gradient, not the engine."""
    return set_info(parameter, replace(info_of(parameter), is_expert=True))


def is_reduced_apart(parameter: torch.Tensor) -> bool:
    """Return True if the gradient of ``parameter`` is left out of the all-reduce over the replicas (experts)."""
    return info_of(parameter).is_expert
