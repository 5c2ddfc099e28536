"""The norm of all gradients of a replica, each parameter counted once, and clipping by it."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from megatron.mpu.groups import SINGLE, Group
from megatron.mpu.mappings import all_reduce
from megatron.mpu.shard import shard_of

ROW = 1024
"""Numbers of a large tensor whose squares are added up in fp32."""
LARGE = 2**16


def counts_here(parameter: torch.Tensor, tensor_rank: int) -> bool:
    """Return whether this rank counts ``parameter`` in sums over the replica.

    A parameter cut over the tensor group counts on every rank, for each holds other elements; one that all hold
    counts on the first. A tied copy (DeepSpeed's ``ds_pipe_replicated``) counts on the stage that owns it.
    """
    if getattr(parameter, "ds_pipe_replicated", False):
        return False
    return tensor_rank == 0 or shard_of(parameter).is_partitioned


def global_norm(
    gradients: Iterable[torch.Tensor],
    *,
    model: Group = SINGLE,
    holders: Group = SINGLE,
    device: torch.device | None = None,
) -> torch.Tensor:
    """Return the 2-norm over all ``gradients`` of all ranks of ``model``, in fp32 or, for fp64 gradients, fp64.

    Collective. Each rank passes the gradients that count there.

    Args:
        holders: replicas each of which has other parts of the gradients.
    """
    squares = [square_of_norm(gradient) for gradient in gradients]
    squared = torch.stack(squares).sum().to(device) if squares else torch.zeros((), dtype=torch.float64, device=device)
    return all_reduce(all_reduce(squared, holders), model).sqrt()


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


def accurate_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return fp64 for fp64, else fp32: the type in which sums are taken."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def clip_coefficient(norm: float, clip_grad: float) -> float:
    """Return the factor that brings gradients of this norm to at most ``clip_grad``; 1 when there is nothing to do."""
    if clip_grad <= 0.0 or norm <= clip_grad:
        return 1.0
    return clip_grad / (norm + 1.0e-6)
