"""Weights of every type that ZeRO handles, the same on all replicas, with predefined gradients."""

from __future__ import annotations

from typing import Any

import torch

from megatron.mpu.groups import Grid
from megatron.mpu.shard import Shard, set_shard
from megatron.optim import MixedPrecisionOptimizer, build_optimizer
from tests.helpers.whole import random_tensor

SHAPES = {
    "table": (37, 16),  # local shards have 19 or 38 rows, one of them padding
    "columns": (36, 10),
    "rows": (10, 48),
    "odd_rows": (8, 30),  # its columns do not fill whole vectors, so one replica owns the entire tensor shard
    "bias": (36,),
    "norm": (10,),
    "pair": (2, 16),
    "scalar": (),
}
"""Logical shapes. The first four and "bias" are sharded over the tensor group."""
PARTITION_DIMS = {"table": 0, "columns": 0, "rows": 1, "odd_rows": 1, "bias": 0}


class Weights(torch.nn.Module):
    """The weights of one tensor rank, filled from ``make_global_values``."""

    def __init__(self, grid: Grid) -> None:
        super().__init__()
        for name, value in make_global_values(0).items():
            shard, local_shape = make_shard(name, grid.tensor.rank, grid.tensor.size)
            parameter = torch.nn.Parameter(make_local_value(value, shard, local_shape))
            setattr(self, name, set_shard(parameter, shard))
        self.frozen = torch.nn.Parameter(torch.ones(3, 5), requires_grad=False)


def make_global_values(seed: int) -> dict[str, torch.Tensor]:
    """Return random tensors of the logical shapes."""
    return {name: random_tensor(100 * seed + i, *shape).float() for i, (name, shape) in enumerate(SHAPES.items())}


def make_shard(name: str, rank: int, size: int) -> tuple[Shard, tuple[int, ...]]:
    """Return the shard of tensor rank ``rank`` and the shape of its local tensor, padding included."""
    shape, dim = SHAPES[name], PARTITION_DIMS.get(name)
    if dim is None:
        return Shard(shape), shape
    local_size = 38 // size if name == "table" else shape[dim] // size
    start = rank * local_size
    local_shape = (*shape[:dim], local_size, *shape[dim + 1 :])
    return Shard(shape, dim, start, min(local_size, shape[dim] - start)), local_shape


def make_local_value(value: torch.Tensor, shard: Shard, local_shape: tuple[int, ...]) -> torch.Tensor:
    """Return this rank's shard of ``value``, with zeros as padding."""
    shard_tensor = torch.zeros(local_shape)
    shard.unpadded(shard_tensor).copy_(shard.narrow(value))
    return shard_tensor


def make_optimizer(module: Weights, grid: Grid, zero_stage: int, **overrides: Any) -> MixedPrecisionOptimizer:
    """Return an optimizer with weight decay, by default AdamW in fp32."""
    options: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1} | overrides
    groups = {"model": grid.model, "tensor": grid.tensor, "data": grid.data}
    return build_optimizer(module.parameters(), zero_stage=zero_stage, **groups, **options)


def take_step(module: Weights, optimizer: MixedPrecisionOptimizer, grid: Grid, step: int) -> None:
    """Take one step on the gradients of two micro-batches."""
    for seed in (2 * step + 1, 2 * step + 2):
        for name, value in make_global_values(seed).items():
            parameter = getattr(module, name)
            shard, local_shape = make_shard(name, grid.tensor.rank, grid.tensor.size)
            gradient = make_local_value(value * optimizer.loss_scale, shard, local_shape).to(parameter.dtype)
            (parameter * gradient).sum().backward()
        optimizer.end_micro_batch()
    if optimizer.reducer.reduces_in_backward:
        # All replicas have equal gradients, so their mean is exact for 2 and 4 replicas.
        optimizer.finish_gradient_sums(1 / grid.data.size)
    optimizer.step()


def copy_weights(module: Weights) -> dict[str, torch.Tensor]:
    """Return a copy of each weight."""
    return {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
