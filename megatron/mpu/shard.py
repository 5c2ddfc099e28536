"""Shard: where a local parameter lies in its global tensor; meta weights; the norm over groups."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

import tds.grad_norm
import tds.gradients
from megatron.mpu.groups import SINGLE, Group

# Where a local parameter lies in its global tensor: the facts that norms, checkpoints and comparisons need.


@dataclass(frozen=True)
class Shard:
    """The part of a global tensor that this rank holds.

    ``global_shape`` is the logical shape, without padding. Along ``partition_dim`` this rank holds the logical
    indices ``start ... start + length``; rows of the local tensor beyond ``length`` are padding, belong to nobody
    and are zero. ``partition_dim`` None: every rank of the tensor group holds the whole tensor.
    """

    global_shape: tuple[int, ...]
    partition_dim: int | None = None
    start: int = 0
    length: int = 0

    @property
    def is_partitioned(self) -> bool:
        return self.partition_dim is not None

    def cut(self, whole: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of the logical tensor ``whole``, without padding."""
        if self.partition_dim is None:
            return whole
        return whole.narrow(self.partition_dim, self.start, self.length)

    def unpadded(self, local: torch.Tensor) -> torch.Tensor:
        """Return the view of ``local`` without its padding rows."""
        if self.partition_dim is None or local.shape[self.partition_dim] == self.length:
            return local
        return local.narrow(self.partition_dim, 0, self.length)


def set_shard(parameter: torch.nn.Parameter, shard: Shard) -> torch.nn.Parameter:
    """Record on ``parameter`` where it lies; layers call this once at construction."""
    parameter.shard = shard  # type: ignore[attr-defined]
    # DeepSpeed and ported scripts read these two names.
    parameter.model_parallel = shard.is_partitioned  # type: ignore[attr-defined]
    parameter.tensor_model_parallel = shard.is_partitioned  # type: ignore[attr-defined]
    return parameter


def set_partial(parameter: torch.nn.Parameter) -> torch.nn.Parameter:
    """Record that each tensor rank's gradient of ``parameter``, which all hold whole, is of its part of the sequence,
    or of its heads.

    ``megatron.optim`` sums it over the tensor group. The name is Megatron's.
    """
    parameter.sequence_parallel = True  # type: ignore[attr-defined]
    return parameter


def is_partial(parameter: torch.Tensor) -> bool:
    """Return whether the gradient of ``parameter`` is a summand on each tensor rank; see ``set_partial``."""
    return bool(getattr(parameter, "sequence_parallel", False))


def empty_weight(shape: tuple[int, ...], shard: Shard) -> torch.nn.Parameter:
    """Return a weight without values yet, marked so that ``megatron.models.common.parameters`` fills it by its name."""
    parameter = set_shard(torch.nn.Parameter(torch.zeros(shape)), shard)
    parameter.is_uninitialized = True  # type: ignore[attr-defined]
    return parameter


def shard_of(parameter: torch.Tensor) -> Shard:
    """Return where ``parameter`` lies; one that no layer marked is held whole by every rank.

    Raises:
        ValueError: it is marked as cut in the way of Megatron's scripts, which does not say where.
    """
    shard = getattr(parameter, "shard", None)
    if shard is not None:
        return shard
    if getattr(parameter, "model_parallel", False) or getattr(parameter, "tensor_model_parallel", False):
        raise ValueError(
            f"a parameter of shape {tuple(parameter.shape)} says model_parallel = True but not which part it is. "
            "Call megatron.mpu.set_shard(parameter, Shard(global_shape, partition_dim, start, length))."
        )
    return Shard(tuple(parameter.shape))


# Weights without values, which take no memory until they are filled, in a model that is being built.


def is_uninitialized(parameter: torch.Tensor) -> bool:
    """Return whether ``empty_weight`` made ``parameter`` and nothing has filled it."""
    return bool(getattr(parameter, "is_uninitialized", False))


@contextmanager
def init_empty_weights() -> Iterator[None]:
    """Let every unset weight keep its shape alone from the moment that a module gets it; ``materialize`` ends that.

    Until then it reads as zeros, and what writes to it gets torch's error of a single memory location.
    """

    def drop(module: nn.Module, name: str, parameter: Any) -> None:
        if parameter is not None and is_uninitialized(parameter):
            parameter.data = parameter.data.new_zeros(()).expand(parameter.shape)

    hook = register_module_parameter_registration_hook(drop)
    try:
        yield
    finally:
        hook.remove()


def materialize(parameter: torch.Tensor) -> None:
    """Let an unset ``parameter`` have memory of its own, of zeros, if it has none."""
    if parameter.untyped_storage().nbytes() < parameter.nbytes:
        parameter.data = torch.zeros(parameter.shape, dtype=parameter.dtype, device=parameter.device)


def global_norm(
    gradients: Iterable[torch.Tensor],
    *,
    model: Group = SINGLE,
    holders: Group = SINGLE,
    device: torch.device | None = None,
) -> torch.Tensor:
    """Return the 2-norm over all ``gradients`` of all ranks of ``model``, in fp64.

    Collective. Each rank passes the gradients that count there.

    Args:
        holders: replicas each of which has other parts of the gradients.
    """
    return tds.grad_norm.global_norm(gradients, [holders.handle, model.handle], device)
