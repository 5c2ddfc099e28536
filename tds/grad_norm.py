"""Norm of gradients that are distributed over ranks, each parameter counted once, and clipping."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from tds import torch_api
from tds.device import is_host
from tds.gradients import multiply
from tds.param_info import is_tensor_parallel, is_tied_copy

ROW = 1024
"""Numbers of a large tensor whose squares are added up in fp32."""
LARGE = 2**16


def square_of_norm(x: torch.Tensor) -> torch.Tensor:
    """Return the sum of squares of ``x`` as a scalar in fp64, from norms in fp32 (fp64 for fp64).

    On a CPU torch adds up the squares of a whole tensor in a few sums of fp32: the norm of 26 million numbers is 1.5e-3
    too small, and that of half of them by another share, so that it would depend on the layout. Those of rows are not.
    """
    dtype = accurate_dtype(x.dtype)
    if x.numel() < LARGE:
        return torch.linalg.vector_norm(x, dtype=dtype).double().square()
    flat = x.flatten()
    whole = flat.numel() - flat.numel() % ROW
    norms = torch.linalg.vector_norm(flat[:whole].view(-1, ROW), dim=-1, dtype=dtype)
    rest = torch.linalg.vector_norm(flat[whole:], dtype=dtype)
    return norms.double().square().sum() + rest.double().square()


def squares_of_norms(gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return what adds up to the ``square_of_norm`` of all: on a host one scalar for each, else one for each type."""
    is_host_work = not gradients or is_host(gradients[0].device)
    return [square_of_norm(gradient) for gradient in gradients] if is_host_work else _squares_by_dtype(gradients)


def _squares_by_dtype(gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """For a device, whose sums are trees: kernels for each weight would take longer to start than to run."""
    by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
    for gradient in gradients:
        by_dtype.setdefault(gradient.dtype, []).append(gradient)
    norms = [torch_api.norms_of_all(same, accurate_dtype(dtype)) for dtype, same in by_dtype.items()]
    return [torch.stack(same).double().square().sum() for same in norms]


def accurate_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return fp64 for fp64, else fp32: the type in which sums are taken."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def clip_coefficient(norm: float, clip_grad: float) -> float:
    """Return the factor that brings gradients of this norm to at most ``clip_grad``; 1 when there is nothing to do."""
    if clip_grad <= 0.0 or norm <= clip_grad:
        return 1.0
    return clip_grad / (norm + 1.0e-6)


def is_counted_in_norm(parameter: torch.Tensor, tensor_rank: int) -> bool:
    """Return True if this rank counts ``parameter`` in sums over the replica.

    A tensor-parallel parameter counts on every rank of the tensor group, one that all these ranks hold counts on the
    first. A tied weight counts on the stage that owns it.
    """
    return not is_tied_copy(parameter) and (tensor_rank == 0 or is_tensor_parallel(parameter))


def global_norm(
    gradients: Iterable[torch.Tensor], groups: Iterable[Any], device: torch.device | None = None
) -> torch.Tensor:
    """Return the 2-norm over all ranks of each of ``groups``, in fp64, on ``device``. Collective.

    Args:
        gradients: those that are counted on this rank.
        groups: process groups over which squares are added up, one behind the other; None: no others.
    """
    squares = squares_of_norms(list(gradients))
    squared = torch.stack(squares).sum().to(device) if squares else torch.zeros((), dtype=torch.float64, device=device)
    for group in groups:
        if group is not None and dist.get_world_size(group) > 1:
            dist.all_reduce(squared, group=group)
    return squared.sqrt()


def clip(gradients: Iterable[torch.Tensor], norm: torch.Tensor, max_norm: float) -> None:
    """Scale the gradients so that their norm is at most ``max_norm``; one that is not a number leaves them alone."""
    if not is_host(norm.device):  # a host that asked for the norm would wait for all that is queued
        if max_norm > 0.0:
            multiply(gradients, torch.where(norm > max_norm, max_norm / (norm + 1.0e-6), torch.ones_like(norm)))
        return
    factor = clip_coefficient(norm.item(), max_norm)
    if factor < 1.0:
        multiply(gradients, factor)
