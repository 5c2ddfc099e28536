"""Adding up gradients over replicas and over the copies of tied weights. Ours, since DeepSpeed's refuses fp64."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist

BUCKET_BYTES = 32 * 2**20


class GradientSource(Protocol):
    """Where the gradients of an optimizer lie, and who does what with them.

    ``before_backward`` and ``after_backward`` surround each run of autograd: a whole backward, or either half of one
    that is split. Between them autograd may add to any parameter's ``grad``, more than once (recompute, tied layers in
    one stage), and run its hooks. Between ``after_backward`` and the next ``before_backward`` nothing touches
    gradients but ``of``, from which sums over replicas may start once no backward will add to a gradient any more.

    Attributes:
        come_in_hooks: a gradient is where it lies once the parameter's own hooks have run, ahead of
            ``after_backward``: sums may start within a backward.
        norm_is_scaled: the norm that the optimizer leaves is that of the scaled loss's gradients.
        takes_unfrozen: the optimizer steps on whatever its groups hold, weights unfrozen since ``initialize`` too.
        are_multiplied_in_step: the optimizer multiplies by its ``gradient_factor`` in its own step, and gives the norm
            of what lies there ahead of that (``norm_of_sums``; it takes it back as ``raw_norm``): so loss and norm come
            to the host in one copy.
    """

    come_in_hooks: bool
    norm_is_scaled: bool
    takes_unfrozen: bool
    are_multiplied_in_step: bool

    @property
    def clips_itself(self) -> bool:
        """Whether the optimizer takes norm and clips in its own step."""

    def of(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return the accumulated gradient; zeros where this rank has none, so that all ranks agree."""

    def loss_scale(self) -> float:
        """Return what each loss is multiplied by ahead of its backward."""

    def before_backward(self) -> None:
        """Called ahead of each run of autograd."""

    def after_backward(self) -> None:
        """Called after each run of autograd."""

    def before_step(self) -> None:
        """Called once the gradients of the global batch are complete, ahead of the optimizer's step."""

    def after_step(self) -> None:
        """Called after the optimizer's step."""

    def forget(self) -> None:
        """Drop the gradients of a batch on which no step is taken."""


def reduce_gradients(
    gradients: Sequence[torch.Tensor],
    group: Any,
    scale: float | torch.Tensor = 1.0,
    bucket_bytes: int = BUCKET_BYTES,
) -> None:
    """Replace each gradient by the sum over ``group`` times ``scale``. Collective.

    Args:
        gradients: the same shapes and dtypes in the same order on every rank.
        group: a process group, or None for no sum at all (one replica).
        bucket_bytes: gradients of one dtype travel together up to this size.
    """
    with torch.no_grad():
        if group is None or dist.get_world_size(group) == 1:
            _multiply(list(gradients), scale)
            return
        for flight in [fly(bucket, group) for bucket in buckets(gradients, bucket_bytes)]:
            flight.land(scale)


@dataclass
class Flight:
    """A sum of gradients on its way."""

    gradients: list[torch.Tensor]
    flat: torch.Tensor
    work: Any

    @torch.no_grad()
    def land(self, scale: float | torch.Tensor) -> None:
        """Wait for the sum, multiply it by ``scale``, and put it where the gradients lie."""
        self.work.wait()
        _multiply([self.flat], scale)
        _copy_back(self.gradients, self.flat)


def fly(bucket: list[torch.Tensor], group: Any, dtype: torch.dtype | None = None) -> Flight:
    """Start the sum over ``group`` of gradients of one dtype; they travel and are added up in ``dtype``, if given."""
    flat = bucket[0] if _is_whole(bucket) else torch.cat([g.reshape(-1) for g in bucket])
    if dtype is not None:
        flat = flat.to(dtype)
    return Flight(bucket, flat, dist.all_reduce(flat, group=group, async_op=True))


T = TypeVar("T", bound=torch.Tensor)


def buckets(gradients: Iterable[T], bucket_bytes: int) -> Iterator[list[T]]:
    """Yield the gradients (or parameters) in groups of one dtype, each of at most ``bucket_bytes`` or of one tensor."""
    by_dtype: dict[torch.dtype, list[T]] = {}
    for gradient in gradients:
        if gradient.is_sparse:
            raise ValueError("sparse gradients cannot be reduced, got one; build the embedding with sparse=False")
        if gradient.numel():
            by_dtype.setdefault(gradient.dtype, []).append(gradient)
    for same in by_dtype.values():
        bucket: list[T] = []
        size = 0
        for gradient in same:
            num_bytes = gradient.numel() * gradient.element_size()
            if bucket and size + num_bytes > bucket_bytes:
                yield bucket
                bucket, size = [], 0
            bucket.append(gradient)
            size += num_bytes
        yield bucket


def _is_whole(bucket: list[torch.Tensor]) -> bool:
    return len(bucket) == 1 and bucket[0].is_contiguous()


def _copy_back(bucket: list[torch.Tensor], flat: torch.Tensor) -> None:
    if bucket[0] is flat:
        return
    start = 0
    for gradient in bucket:
        gradient.copy_(flat[start : start + gradient.numel()].view_as(gradient))
        start += gradient.numel()


def _multiply(gradients: list[torch.Tensor], scale: float | torch.Tensor) -> None:
    if isinstance(scale, (int, float)) and scale == 1.0:
        return
    for gradient in gradients:
        gradient.mul_(scale)


@torch.no_grad()
def sum_tied(weights: Iterable[tuple[torch.Tensor, Any]], gradient_of: Any, dtype: torch.dtype | None = None) -> None:
    """Add up the gradients of each tied weight over the stages that hold a copy. Collective over each tied group.

    Args:
        weights: (parameter, group) in the same order on every rank, as ``get_tied_weights_and_groups`` gives them.
        dtype: in which sums travel and are taken; None: the gradients' own.
    """
    for weight, group in weights:
        if weight.requires_grad and dist.get_world_size(group) > 1:
            gradient = gradient_of(weight)
            summed = gradient if dtype is None else gradient.to(dtype)
            dist.all_reduce(summed, group=group)
            if summed is not gradient:
                gradient.copy_(summed)
