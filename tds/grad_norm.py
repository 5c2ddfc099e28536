"""The norm of gradients that are distributed over ranks, with each parameter counted once, and clipping."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from tds import torch_api
from tds.device import is_host
from tds.gradients import multiply
from tds.param_info import is_tensor_parallel, is_tied_copy

ROW_NUMEL = 1024
"""Number of elements of a large tensor whose squares are summed in fp32."""
LARGE_NUMEL = 2**16


def square_of_norm(x: torch.Tensor) -> torch.Tensor:
    """Sum the squares of ``x``; return an fp64 scalar.

    A large tensor is split into rows with ``ROW_NUMEL`` elements. Row norms are computed in fp32 (in fp64 if ``x`` is
    fp64), and their squares are summed in fp64. On a CPU, torch would sum all squares in a few fp32 accumulators. For
    26 million elements, the norm is then too small by a relative error of 1.5e-3. This error depends on the number of
    elements, so the norm would depend on the layout.
    """
    dtype = accurate_dtype(x.dtype)
    if x.numel() < LARGE_NUMEL:
        return torch.linalg.vector_norm(x, dtype=dtype).double().square()
    flat = x.flatten()
    numel_in_rows = flat.numel() - flat.numel() % ROW_NUMEL
    norms = torch.linalg.vector_norm(flat[:numel_in_rows].view(-1, ROW_NUMEL), dim=-1, dtype=dtype)
    tail_norm = torch.linalg.vector_norm(flat[numel_in_rows:], dtype=dtype)
    return norms.double().square().sum() + tail_norm.double().square()


def squares_of_norms(gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return scalars whose sum is the squared norm of all gradients: one per gradient on a CPU, else one per dtype."""
    is_host_work = not gradients or is_host(gradients[0].device)
    return [square_of_norm(gradient) for gradient in gradients] if is_host_work else _squares_by_dtype(gradients)


def _squares_by_dtype(gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Compute the squares with one kernel per dtype, because launching a kernel per weight would take longer."""
    by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
    for gradient in gradients:
        by_dtype.setdefault(gradient.dtype, []).append(gradient)
    norms = [torch_api.norms_of_all(same_dtype, accurate_dtype(dtype)) for dtype, same_dtype in by_dtype.items()]
    return [torch.stack(same_dtype).double().square().sum() for same_dtype in norms]


def accurate_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which sums are computed: fp64 for fp64, otherwise fp32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def clip_coefficient(norm: float, clip_grad: float) -> float:
    """Return the factor that reduces gradients of this norm to at most ``clip_grad``; 1 if they are small enough."""
    if clip_grad <= 0.0 or norm <= clip_grad:
        return 1.0
    return clip_grad / (norm + 1.0e-6)


def is_counted_in_norm(parameter: torch.Tensor, tensor_rank: int) -> bool:
    """Return True if this rank counts ``parameter`` in sums over a replica's ranks.

    A parameter that is sharded over the tensor group counts on every rank, a replicated one on the first rank. A tied
    weight counts on the stage that owns it.
    """
    return not is_tied_copy(parameter) and (tensor_rank == 0 or is_tensor_parallel(parameter))


def global_norm(
    gradients: Iterable[torch.Tensor], groups: Iterable[Any], device: torch.device | None = None
) -> torch.Tensor:
    """Compute the 2-norm over all ranks in each of ``groups``, in fp64, on ``device``. Collective.

    Args:
        gradients: the gradients that this rank counts.
        groups: process groups over which squares are summed, one after the other; an entry None is a single rank.
    """
    squares = squares_of_norms(list(gradients))
    squared = torch.stack(squares).sum().to(device) if squares else torch.zeros((), dtype=torch.float64, device=device)
    for group in groups:
        if group is not None and dist.get_world_size(group) > 1:
            dist.all_reduce(squared, group=group)
    return squared.sqrt()


def clip(gradients: Iterable[torch.Tensor], norm: torch.Tensor, max_norm: float) -> None:
    """Scale the gradients so that their norm is at most ``max_norm``; a NaN norm leaves them unchanged."""
    if not is_host(norm.device):  # reading the norm would make the host wait for all queued work
        if max_norm > 0.0:
            multiply(gradients, torch.where(norm > max_norm, max_norm / (norm + 1.0e-6), torch.ones_like(norm)))
        return
    factor = clip_coefficient(norm.item(), max_norm)
    if factor < 1.0:
        multiply(gradients, factor)
