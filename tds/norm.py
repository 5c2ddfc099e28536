"""Norm and clipping of gradients that lie on many ranks: every parameter counts once."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist

EPSILON = 1e-6
ROW = 1024
"""Numbers of a large tensor whose squares are added up in fp32."""
LARGE = 2**16


def is_counted(parameter: torch.Tensor, tensor_rank: int) -> bool:
    """True on exactly one of the ranks that hold the same parameter.

    Tied copies count on the first stage that holds one; what every rank of the tensor group holds whole counts on the
    first of them.
    """
    if getattr(parameter, "ds_pipe_replicated", False):
        return False
    is_partitioned = getattr(parameter, "model_parallel", False) or getattr(parameter, "tensor_model_parallel", False)
    return tensor_rank == 0 or bool(is_partitioned)


def global_norm(gradients: Iterable[torch.Tensor], group: Any, device: torch.device) -> torch.Tensor:
    """Return the 2-norm over all ranks of ``group`` in fp64; ``gradients`` are those counted here. Collective."""
    total = torch.zeros((), dtype=torch.float64, device=device)
    squares = [square(gradient) for gradient in gradients]
    if squares:
        total += torch.stack(squares).sum()
    if group is not None and dist.get_world_size(group) > 1:
        dist.all_reduce(total, group=group)
    return total.sqrt()


def square(x: torch.Tensor) -> torch.Tensor:
    """Return the sum of squares in fp64, of a large tensor from norms of rows: torch's is too small on a CPU."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    if x.numel() < LARGE:
        return torch.linalg.vector_norm(x, dtype=dtype).double().square()
    flat = x.flatten()
    start = flat.numel() % ROW
    norms = torch.linalg.vector_norm(flat[start:].view(-1, ROW), dim=-1, dtype=dtype)
    return norms.double().square().sum() + torch.linalg.vector_norm(flat[:start], dtype=dtype).double().square()


def clip(gradients: Iterable[torch.Tensor], norm: torch.Tensor, max_norm: float) -> None:
    """Scale the gradients so that their norm is at most ``max_norm``."""
    factor = max_norm / (norm + EPSILON)
    if factor < 1.0:
        for gradient in gradients:
            gradient.mul_(factor)
