"""Entering and leaving the tensor-parallel region, by pairs of functions that are each other's transpose.

| function | forward | backward |
|---|---|---|
| `copy_to_tensor_region` | identity | all-reduce |
| `reduce_from_tensor_region` | all-reduce | identity |
| `scatter_to_tensor_region` | this rank's slice of the last dimension | all-gather |
| `gather_from_tensor_region` | all-gather along the last dimension | this rank's slice |

With sequence parallelism, hidden states outside the region are sharded along their first dimension, the sequence:

| function | forward | backward |
|---|---|---|
| `gather_from_sequence_region` | all-gather along the first dimension | reduce-scatter |
| `reduce_scatter_to_sequence_region` | reduce-scatter along the first dimension | all-gather |
| `scatter_to_sequence_region` | this rank's slice of the first dimension | all-gather |

All are collective over ``group``, and the identity if it has one rank.

Source: Shoeybi et al. 2019, "Megatron-LM", section 3 (``f`` and ``g`` there are copy and reduce); Korthikanti et al.
2022, "Reducing activation recomputation in large transformer models", section 4.2.2 (the same two with a bar).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from megatron.mpu.groups import Group
from megatron.torch_compat import all_gather_single, reduce_scatter_single


def copy_to_tensor_region(x: torch.Tensor, group: Group) -> torch.Tensor:
    """Return ``x`` unchanged; all-reduce the gradient over ``group``."""
    return x if group.size == 1 else _Copy.apply(x, group)


def reduce_from_tensor_region(x: torch.Tensor, group: Group, *, in_place: bool = False) -> torch.Tensor:
    """Sum ``x`` over ``group``.

    Args:
        in_place: overwrite ``x``, which the preceding operation must not save for backward. Non-contiguous tensors and
            tensors in compiled layers are copied nevertheless.
    """
    in_place = in_place and not torch.compiler.is_compiling() and x.is_contiguous()
    return x if group.size == 1 else _Reduce.apply(x, group, in_place)


def scatter_to_tensor_region(x: torch.Tensor, group: Group) -> torch.Tensor:
    """Slice the last dimension for this rank."""
    return x if group.size == 1 else _Scatter.apply(x, group)


def gather_from_tensor_region(x: torch.Tensor, group: Group) -> torch.Tensor:
    """Concatenate all ranks' slices along the last dimension."""
    return x if group.size == 1 else _Gather.apply(x, group)


def gather_from_sequence_region(x: torch.Tensor, group: Group) -> torch.Tensor:
    """Concatenate all ranks' slices along the first dimension; gradients are reduce-scattered."""
    return x if group.size == 1 else _GatherRows.apply(x, group)


def reduce_scatter_to_sequence_region(x: torch.Tensor, group: Group) -> torch.Tensor:
    """Sum ``x`` over ``group`` and return this rank's slice along the first dimension."""
    return x if group.size == 1 else _ReduceScatterRows.apply(x, group)


def scatter_to_sequence_region(x: torch.Tensor, group: Group) -> torch.Tensor:
    """Slice ``x``, which is the same on every rank, along the first dimension for this rank.

    Raises:
        ValueError: the first dimension is not a multiple of the group size.
    """
    return x if group.size == 1 else _ScatterRows.apply(x, group)


def enter_tensor_region(x: torch.Tensor, group: Group, sequence_parallel: bool = False) -> torch.Tensor:
    """Enter a tensor-parallel region: return the full tensor, whose gradient is reduced over ``group``.

    Args:
        sequence_parallel: ``x`` is this rank's sequence slice rather than the full sequence.
    """
    return gather_from_sequence_region(x, group) if sequence_parallel else copy_to_tensor_region(x, group)


def leave_tensor_region(
    x: torch.Tensor, group: Group, sequence_parallel: bool = False, *, in_place: bool = False
) -> torch.Tensor:
    """Sum ``x`` over ``group``; with ``sequence_parallel`` return this rank's slice of the sum.

    Args:
        in_place: see ``reduce_from_tensor_region``.
    """
    if sequence_parallel:
        return reduce_scatter_to_sequence_region(x, group)
    return reduce_from_tensor_region(x, group, in_place=in_place)


def all_reduce(x: torch.Tensor, group: Group, op: Any = dist.ReduceOp.SUM) -> torch.Tensor:
    """All-reduce ``x`` in place over ``group`` and return it; a single-rank group leaves it unchanged."""
    if group.size > 1:
        dist.all_reduce(x, op=op, group=group.handle)
    return x


@dataclass
class AsyncHandle:
    """A running collective and its output ``tensor``, which is valid after ``wait``."""

    tensor: torch.Tensor
    work: Any
    source: torch.Tensor  # the input, kept alive until the collective has finished

    def wait(self) -> torch.Tensor:
        """Wait for the collective and return the output."""
        self.work.wait()
        return self.tensor


def start_all_reduce(x: torch.Tensor, group: Group) -> AsyncHandle:
    """Start an in-place all-reduce of ``x`` over ``group``."""
    return AsyncHandle(x, dist.all_reduce(x, group=group.handle, async_op=True), x)


def start_all_gather(x: torch.Tensor, group: Group) -> AsyncHandle:
    """Start an all-gather of ``x`` along the first dimension."""
    x = x.contiguous()
    gathered = x.new_empty((group.size * x.shape[0], *x.shape[1:]))
    return AsyncHandle(gathered, all_gather_single(gathered, x, group=group.handle, async_op=True), x)


def start_reduce_scatter(x: torch.Tensor, group: Group) -> AsyncHandle:
    """Start a reduce-scatter of ``x`` along the first dimension.

    Raises:
        ValueError: the first dimension is not a multiple of the group size.
    """
    shard = _empty_shard(x, group)
    x = x.contiguous()
    return AsyncHandle(shard, reduce_scatter_single(shard, x, group=group.handle, async_op=True), x)


def _empty_shard(x: torch.Tensor, group: Group) -> torch.Tensor:
    """Allocate the output for a reduce-scatter of ``x``, or raise ValueError if the rows cannot be split evenly."""
    if x.shape[0] % group.size:
        raise ValueError(
            "with --sequence-parallel, the sequence length must be a multiple of the tensor-parallel size, got "
            f"{x.shape[0]} and {group.size}. Choose another length, or remove --sequence-parallel."
        )
    return x.new_empty((x.shape[0] // group.size, *x.shape[1:]))


def _all_gather_rows(x: torch.Tensor, group: Group) -> torch.Tensor:
    """All-gather ``x`` along the first dimension."""
    gathered = x.new_empty((group.size * x.shape[0], *x.shape[1:]))
    all_gather_single(gathered, x.contiguous(), group=group.handle)
    return gathered


def _reduce_scatter_rows(x: torch.Tensor, group: Group) -> torch.Tensor:
    """Reduce-scatter ``x`` along the first dimension."""
    shard = _empty_shard(x, group)
    reduce_scatter_single(shard, x.contiguous(), group=group.handle)
    return shard


def _local_slice(x: torch.Tensor, group: Group) -> torch.Tensor:
    """Slice the last dimension for this rank, or raise ValueError if it cannot be split evenly."""
    if x.shape[-1] % group.size:
        raise ValueError(
            f"the last dimension ({x.shape[-1]}) must be divisible by the group size ({group.size}). "
            "Choose a multiple of the tensor-parallel size."
        )
    return x.chunk(group.size, dim=-1)[group.rank].contiguous()


def _all_gather(x: torch.Tensor, group: Group) -> torch.Tensor:
    """All-gather ``x`` along the last dimension."""
    slices = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(group.size)]
    dist.all_gather(slices, x.contiguous(), group=group.handle)
    return torch.cat(slices, dim=-1)


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        # A copy, because autograd may pass the same gradient to other nodes.
        return all_reduce(grads[0].contiguous().clone(), ctx.group), None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group, in_place: bool) -> torch.Tensor:
        if in_place:
            ctx.mark_dirty(x)
            return all_reduce(x, group)
        return all_reduce(x.contiguous().clone(), group)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return grads[0], None, None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group) -> torch.Tensor:
        ctx.group = group
        return _local_slice(x, group)

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
        return _local_slice(grads[0], ctx.group), None


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group) -> torch.Tensor:
        ctx.group = group
        return _all_gather_rows(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return _reduce_scatter_rows(grads[0], ctx.group), None


class _ReduceScatterRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group) -> torch.Tensor:
        ctx.group = group
        return _reduce_scatter_rows(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return _all_gather_rows(grads[0], ctx.group), None


class _ScatterRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group) -> torch.Tensor:
        ctx.group = group
        _empty_shard(x, group)  # raises if the rows cannot be split evenly
        return x.chunk(group.size)[group.rank].contiguous()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return _all_gather_rows(grads[0], ctx.group), None
