"""shard_of: the recorded shard of a parameter; weights without memory; the gradient norm over groups."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

import tds.grad_norm
from megatron.mpu.groups import SINGLE, Group
from tds.param_info import InitialValues, info_of, is_tensor_parallel, set_info
from tds.param_info import Shard as Shard
from tds.param_info import is_partial as is_partial
from tds.param_info import set_partial as set_partial
from tds.param_info import set_shard as set_shard


def empty_weight(
    shape: tuple[int, ...], shard: Shard, initial_values: InitialValues | None = None
) -> torch.nn.Parameter:
    """Return a weight of zeros marked as uninitialized; ``megatron.models.common.parameters`` draws its values.

    Args:
        initial_values: distribution of the values; None: normal, with the standard deviation of the model's rule.
    """
    parameter = set_shard(torch.nn.Parameter(torch.zeros(shape)), shard)
    set_info(parameter, replace(info_of(parameter), is_uninitialized=True, initial_values=initial_values))
    return parameter


def shard_of(parameter: torch.Tensor) -> Shard:
    """Return the recorded shard of ``parameter``, or a shard of the full tensor if no layer has recorded one.

    Raises:
        ValueError: the parameter is marked as sharded by Megatron's attribute, which does not state its position.
    """
    shard = info_of(parameter).shard
    if shard is not None:
        return shard
    if is_tensor_parallel(parameter):
        raise ValueError(
            f"a parameter of shape {tuple(parameter.shape)} has model_parallel = True but no recorded shard. "
            "Call megatron.mpu.set_shard(parameter, Shard(global_shape, partition_dim, start, length))."
        )
    return Shard(tuple(parameter.shape))


# Uninitialized weights, which occupy no memory until they are materialized.


def set_uninitialized(parameter: torch.Tensor, is_uninitialized: bool) -> None:
    """Record whether the values of ``parameter`` have yet to be drawn."""
    set_info(parameter, replace(info_of(parameter), is_uninitialized=is_uninitialized))


def is_uninitialized(parameter: torch.Tensor) -> bool:
    """Return True if the values of ``parameter``, created by ``empty_weight``, have yet to be drawn."""
    return info_of(parameter).is_uninitialized


@contextmanager
def init_empty_weights() -> Iterator[None]:
    """Allocate no memory for the uninitialized weights of modules built in the block; ``materialize`` allocates it.

    Until then a weight reads as zeros, and writing to it raises torch's error about a single memory location.
    """

    def release_memory(module: nn.Module, name: str, parameter: Any) -> None:
        if parameter is not None and is_uninitialized(parameter):
            parameter.data = parameter.data.new_zeros(()).expand(parameter.shape)

    hook = register_module_parameter_registration_hook(release_memory)
    try:
        yield
    finally:
        hook.remove()


def materialize(parameter: torch.Tensor) -> None:
    """Allocate zeroed memory for ``parameter`` if it has none."""
    if parameter.untyped_storage().nbytes() < parameter.nbytes:
        parameter.data = torch.zeros(parameter.shape, dtype=parameter.dtype, device=parameter.device)


def global_norm(
    gradients: Iterable[torch.Tensor],
    *,
    model: Group = SINGLE,
    holders: Group = SINGLE,
    device: torch.device | None = None,
) -> torch.Tensor:
    """Compute the 2-norm over the ``gradients`` of all ranks in ``model`` and ``holders``, in fp64. Collective.

    Args:
        gradients: gradients that this rank contributes to the norm.
        holders: replicas that hold different gradient shards.
    """
    return tds.grad_norm.global_norm(gradients, [holders.handle, model.handle], device)
