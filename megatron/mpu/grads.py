"""The norm of all gradients of a replica, each parameter counted once, and clipping by it."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from megatron.mpu.groups import SINGLE, Group
from megatron.mpu.mappings import all_reduce
from megatron.mpu.shard import shard_of


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
    norms = [gradient.norm(dtype=accurate_dtype(gradient.dtype)) for gradient in gradients]
    squared = torch.zeros((), dtype=torch.float64, device=device)
    if norms:
        squared = torch.stack([norm.to(torch.float64) for norm in norms]).square().sum().to(squared.device)
    return all_reduce(all_reduce(squared, holders), model).sqrt()


def accurate_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return fp64 for fp64, else fp32: the type in which sums are taken."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def clip_coefficient(norm: float, clip_grad: float) -> float:
    """Return the factor that brings gradients of this norm to at most ``clip_grad``; 1 when there is nothing to do."""
    if clip_grad <= 0.0 or norm <= clip_grad:
        return 1.0
    return clip_grad / (norm + 1.0e-6)
