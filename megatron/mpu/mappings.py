"""Into and out of the tensor-parallel region: each function is the other's transpose.

| function | forward | backward |
|---|---|---|
| `copy_to_tensor_region` | identity | all-reduce |
| `reduce_from_tensor_region` | all-reduce | identity |
| `scatter_to_tensor_region` | own slice of the last dimension | all-gather |
| `gather_from_tensor_region` | all-gather along the last dimension | own slice |

All are collective over ``group`` and the identity where it has one rank.

Source: Shoeybi et al. 2019, "Megatron-LM", section 3 (``f`` and ``g`` there are copy and reduce).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from megatron.mpu.groups import Group


def copy_to_tensor_region(x: torch.Tensor, group: Group) -> torch.Tensor:
    """Return ``x`` as it is; its gradient is summed over ``group``."""
    return x if group.size == 1 else _Copy.apply(x, group)


def reduce_from_tensor_region(x: torch.Tensor, group: Group) -> torch.Tensor:
    """Return the sum of ``x`` over ``group``."""
    return x if group.size == 1 else _Reduce.apply(x, group)


def scatter_to_tensor_region(x: torch.Tensor, group: Group) -> torch.Tensor:
    """Return this rank's slice of the last dimension."""
    return x if group.size == 1 else _Scatter.apply(x, group)


def gather_from_tensor_region(x: torch.Tensor, group: Group) -> torch.Tensor:
    """Return the slices of all ranks joined along the last dimension."""
    return x if group.size == 1 else _Gather.apply(x, group)


def all_reduce(x: torch.Tensor, group: Group, op: Any = dist.ReduceOp.SUM) -> torch.Tensor:
    """Reduce ``x`` in place over ``group`` and return it; nothing happens where there is one rank."""
    if group.size > 1:
        dist.all_reduce(x, op=op, group=group.handle)
    return x


def _own_slice(x: torch.Tensor, group: Group) -> torch.Tensor:
    if x.shape[-1] % group.size:
        raise ValueError(
            f"the last dimension must be a multiple of the group size, got {x.shape[-1]} and {group.size}. "
            "Choose a size that the tensor-parallel size divides."
        )
    return x.chunk(group.size, dim=-1)[group.rank].contiguous()


def _all_gather(x: torch.Tensor, group: Group) -> torch.Tensor:
    parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(group.size)]
    dist.all_gather(parts, x.contiguous(), group=group.handle)
    return torch.cat(parts, dim=-1)


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return all_reduce(grads[0].contiguous().clone(), ctx.group), None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group) -> torch.Tensor:
        return all_reduce(x.contiguous().clone(), group)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return grads[0], None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group) -> torch.Tensor:
        ctx.group = group
        return _own_slice(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return _all_gather(grads[0], ctx.group), None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group) -> torch.Tensor:
        ctx.group = group
        return _all_gather(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return _own_slice(grads[0], ctx.group), None
