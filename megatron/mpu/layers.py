"""ColumnParallelLinear, RowParallelLinear and VocabParallelEmbedding; products that overlap with communication."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import tds.linear_function
from megatron.mpu.embedding_lookup import embedding_lookup
from megatron.mpu.groups import SINGLE, Group
from megatron.mpu.mappings import (
    AsyncHandle,
    enter_tensor_region,
    gather_from_sequence_region,
    gather_from_tensor_region,
    leave_tensor_region,
    start_all_gather,
    start_all_reduce,
    start_reduce_scatter,
)
from megatron.mpu.matrices import set_matrices
from megatron.mpu.shard import Shard, empty_weight, set_partial, set_shard
from tds.linear_function import is_deferring_weight_grads, multiply, multiply_grad
from tds.param_info import info_of

# Product with a weight and a bias. In layers compiled for a CPU the bias is added separately.
#
# Compiled for a CPU, torch's product with a bias first copies the bias to every row. A bias that is added separately is
# fused with the operation that follows, such as GELU or the residual addition. The gradient of the bias must not be
# fused with the operations before it: the compiler would recompute each summand of the sum over rows, column by column.
#
# | first product of the feed-forward layer and GELU, [4096, 512] to 2,048, fp32, 2 cores; ms | forward | backward |
# |---|---|---|
# | products only (two in backward) | 24.4 | 50.1 |
# | bias added by the product | 30.6 | 60.0 |
# | bias added separately, its gradient a sum that the compiler generates | 28.4 | 67.8 |
# | bias added separately, its gradient a product with ones (the implementation below) | 29.8 | 56.5 |
#
# A custom operator expands the bias to all rows without a copy. An autograd.Function could define the same gradient,
# but would keep the compiled layer out of torch's cache.


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Compute ``x W^T + b``.

    Shapes:
        x      [..., input_size]
        weight [output_size, input_size], bias [output_size]
        output [..., output_size]
    """
    if bias is not None and _adds_bias_separately(x):
        return add_bias(F.linear(x, weight), bias)
    return tds.linear_function.linear(x, weight, bias)


MIN_ALIGNMENT, PADDED_ALIGNMENT = 8, 64
"""Alignment of logits on devices other than the CPU.

A width that is not a multiple of ``MIN_ALIGNMENT`` columns (16 bytes of a 16-bit dtype) is padded to a multiple of
``PADDED_ALIGNMENT`` columns.
"""


def aligned_width(num_columns: int, device: torch.device) -> int:
    """Return the padded width of a product with ``num_columns`` logit columns on ``device``."""
    if device.type == "cpu" or num_columns % MIN_ALIGNMENT == 0:
        return num_columns
    return -(-num_columns // PADDED_ALIGNMENT) * PADDED_ALIGNMENT


def aligned_linear(x: torch.Tensor, table: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Compute ``x table^T + bias``, [..., v/t], with products of aligned width in forward and backward."""
    num_rows = len(table)
    width = aligned_width(num_rows, x.device) if torch.is_grad_enabled() and table.requires_grad else num_rows
    if width == num_rows:
        return linear(x, table, bias)
    return F.linear(x, resize_rows(table, width), None if bias is None else resize_rows(bias, width))[..., :num_rows]


def resize_rows(table: torch.Tensor, num_rows: int) -> torch.Tensor:
    """Truncate or zero-pad ``table`` to ``num_rows`` rows."""
    if len(table) >= num_rows:
        return table[:num_rows]
    return torch.cat([table, table.new_zeros(num_rows - len(table), *table.shape[1:])])


def add_bias(x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Return ``x + bias`` for ``x`` [..., h] and ``bias`` [h]."""
    return x + (_expand_bias(bias, x.shape) if _adds_bias_separately(x) else bias)


def _adds_bias_separately(x: torch.Tensor) -> bool:
    """Return True if a bias is added separately: in fp32 and fp64 layers compiled for a CPU.

    In 16-bit layers the product adds the bias, so that the result is rounded only once.
    """
    return torch.compiler.is_compiling() and x.device.type == "cpu" and x.dtype in (torch.float32, torch.float64)


@torch.library.custom_op("megatron_tds::in_every_row", mutates_args=())
def _expand_bias(bias: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """Expand ``bias`` to ``shape``, without copying it to every row."""
    return bias.clone(memory_format=torch.contiguous_format).expand(shape)


@_expand_bias.register_fake
def _(bias: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    return torch.empty_like(bias, memory_format=torch.contiguous_format).expand(shape)


def _bias_gradient(ctx: Any, grad: torch.Tensor) -> Any:
    """Compute the bias gradient: the sum over rows, as a product with ones.

    The product is faster than a sum and as exact as the weight gradient.
    """
    grad_rows = grad.reshape(-1, grad.shape[-1])
    return grad_rows.new_ones(1, len(grad_rows)).mm(grad_rows).squeeze(0), None


_expand_bias.register_autograd(_bias_gradient)


# Products of a column-parallel layer. In backward, communication of the tensor group overlaps with products:
#
# | collective | needed for | overlaps with |
# |---|---|---|
# | all-gather of the input (sequence parallelism) | the weight's gradient | the input's gradient |
# | all-reduce of the input's gradient, or reduce-scatter (sequence parallelism) | the result | the weight's gradient |
#
# With sequence parallelism the graph saves only this rank's slice of the input, not the gathered input.
#
# The results are bitwise equal to those of the same operations without overlap. On GPUs, kernels start in the order of
# their calls only with ``CUDA_DEVICE_MAX_CONNECTIONS=1``, which Megatron requires as well. For tensor parallelism
# without a pipeline ``megatron.training.initialize`` sets this variable. A pipeline posts receives early. In a single
# queue they would block the kernels after them, so a pipeline gets several queues. The results are then the same, but a
# collective may start later.
#
# While a schedule defers weight gradients (``tds.engine.weight_grad_store``), no product is left to overlap with a
# collective, so the operations run sequentially. Compiled layers use the same sequential operations, whose order the
# compiler chooses. With sequence parallelism their graph saves the gathered input, s b h elements instead of s b h / t,
# once for attention and once for the feed-forward half.
#
# Source: Korthikanti et al. 2022, "Reducing activation recomputation in large transformer models", section 4.2.2.

Pair = tuple[torch.Tensor, torch.Tensor | None]
"""A weight and its bias."""


def column_products(
    x: torch.Tensor, pairs: Sequence[Pair], group: Group, sequence_parallel: bool = False
) -> tuple[torch.Tensor, ...]:
    """Compute ``X W^T + b`` for each pair of W and b, sharded by rows. Collective, also in backward.

    Shapes:
        x      [s, b, input_size], or [s/t, b, input_size] with ``sequence_parallel``
        output [s, b, output_size/t] each
    """
    if group.size == 1 or is_deferring_weight_grads() or torch.compiler.is_compiling():
        x = enter_tensor_region(x, group, sequence_parallel)
        return tuple(linear(x, weight, bias) for weight, bias in pairs)
    weights, biases = zip(*pairs, strict=True)
    products: tuple[torch.Tensor, ...] = _ColumnProducts.apply(x, group, sequence_parallel, *weights, *biases)
    return products


class _ColumnProducts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, group: Group, sequence_parallel: bool, *leaves: torch.Tensor | None
    ) -> tuple[torch.Tensor, ...]:
        num_weights = len(leaves) // 2
        weights, biases = leaves[:num_weights], leaves[num_weights:]
        ctx.group, ctx.sequence_parallel = group, sequence_parallel
        ctx.leaves = weights  # the parameters themselves: under recompute, saved_tensors are detached copies
        ctx.save_for_backward(x, *weights)
        full_x = gather_from_sequence_region(x, group) if sequence_parallel else x
        return tuple(multiply(full_x, w, b) for w, b in zip(weights, biases, strict=True))  # type: ignore[arg-type]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        x, *weights = ctx.saved_tensors
        needs_x, needs_weights, needs_biases = _split_needs_grad(ctx.needs_input_grad, len(weights))
        gather = start_all_gather(x, ctx.group) if ctx.sequence_parallel and any(needs_weights) else None
        grad_rows = [grad.reshape(-1, grad.shape[-1]) for grad in grads]  # [s b, output_size/t] each
        reduction = _start_input_grad_reduction(ctx, x, grad_rows, weights) if needs_x else None
        full_x = x if gather is None else gather.wait()
        inputs = full_x.reshape(-1, full_x.shape[-1])  # [s b, input_size]
        param_grads = [
            _weight_grad(weight, rows, inputs) if needed else None
            for weight, rows, needed in zip(ctx.leaves, grad_rows, needs_weights, strict=True)
        ]
        param_grads += [rows.sum(0) if needed else None for rows, needed in zip(grad_rows, needs_biases, strict=True)]
        return None if reduction is None else reduction.wait(), None, None, *param_grads


def _split_needs_grad(needs: Sequence[bool], num_weights: int) -> tuple[bool, Sequence[bool], Sequence[bool]]:
    """Split ``needs_input_grad`` into flags for the input, ``num_weights`` weights and as many biases."""
    return needs[0], needs[3 : 3 + num_weights], needs[3 + num_weights :]


def _weight_grad(weight: torch.Tensor, rows: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor | None:
    """Compute the weight gradient, or return None if the parameter's ``add_product`` has accumulated it in place.

    The gradient is bitwise equal to autograd's: for a non-contiguous weight both are computed as a transposed product,
    which may differ from the usual product in the last bits (MKL on AMD processors).
    """
    add_product = info_of(weight).add_product
    if add_product is not None:
        add_product(rows, inputs)
        return None
    is_contiguous = weight.stride() == (weight.shape[1], 1)
    return rows.t().mm(inputs) if is_contiguous else inputs.t().mm(rows).t()


def _start_input_grad_reduction(
    ctx: Any, x: torch.Tensor, rows: Sequence[torch.Tensor], weights: Sequence[torch.Tensor]
) -> AsyncHandle:
    """Compute this rank's partial sum of the input gradient and start the reduction over the group."""
    products = [info_of(leaf).products for leaf in ctx.leaves]
    partial_grad = multiply_grad(rows[0], weights[0], products[0])
    for grad, weight, weight_products in zip(rows[1:], weights[1:], products[1:], strict=True):
        partial_grad += multiply_grad(grad, weight, weight_products)
    if ctx.sequence_parallel:
        return start_reduce_scatter(partial_grad.view(ctx.group.size * x.shape[0], *x.shape[1:]), ctx.group)
    return start_all_reduce(partial_grad.view(x.shape), ctx.group)


# Linear layers and the embedding, sharded over the tensor-parallel group that they take as an argument.
#
# Weights are created as zeros and marked as uninitialized. ``megatron.models.common.parameters`` draws their values
# from a counter-based generator keyed by seed and name, so that every layout starts from the same values.


def divide(name: str, size: int, group: Group) -> int:
    """Divide ``size`` by the group size.

    Raises:
        ValueError: ``size`` is not a multiple of the group size.
    """
    if size % group.size:
        raise ValueError(
            f"{name} must be a multiple of --model-parallel-size, got {size} and {group.size}. "
            f"Choose a multiple of {group.size} or a smaller --model-parallel-size."
        )
    return size // group.size


class ColumnParallelLinear(nn.Module):
    """``Y = X A^T + b`` with A sharded by output rows: rank i holds A_i and returns Y_i = X A_i^T + b_i.

    Shapes:
        input  [s, b, input_size], the same on every rank; with ``sequence_parallel`` its slice [s/t, b, input_size]
        output [s, b, output_size/t], or [s, b, output_size] with ``gather_output``

    Args:
        has_entered: the input has already passed ``enter_tensor_region``, because several layers share it.

    Raises:
        ValueError: ``output_size`` is not a multiple of the group size.

    Source: Shoeybi et al. 2019, "Megatron-LM", section 3.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        bias: bool = True,
        gather_output: bool = False,
        group: Group = SINGLE,
        sequence_parallel: bool = False,
        has_entered: bool = False,
    ) -> None:
        super().__init__()
        self.group = group
        self.gather_output = gather_output
        self.sequence_parallel, self.has_entered = sequence_parallel, has_entered
        self.shares = (0,) if has_entered else ()  # inputs whose gradient is a partial sum, for megatron.debug
        local_size = divide("output_size", output_size, group)
        start = group.rank * local_size
        self.weight = empty_weight((local_size, input_size), Shard((output_size, input_size), 0, start, local_size))
        set_matrices(self.weight)
        self.bias: nn.Parameter | None = None
        if bias:
            self.bias = set_shard(nn.Parameter(torch.zeros(local_size)), Shard((output_size,), 0, start, local_size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        (y,) = self.products(x, (self.weight, self.bias))  # [s, b, output_size/t]
        return gather_from_tensor_region(y, self.group) if self.gather_output else y

    def products(self, x: torch.Tensor, *pairs: Pair) -> tuple[torch.Tensor, ...]:
        """Multiply ``x`` with each weight and add the bias. Collective."""
        if self.has_entered:
            return tuple(linear(x, weight, bias) for weight, bias in pairs)
        return column_products(x, pairs, self.group, self.sequence_parallel)


class RowParallelLinear(nn.Module):
    """``Y = X A^T + b`` with A sharded by input columns: the ranks' partial products are summed, then b is added.

    Shapes:
        input  [s, b, input_size/t], this rank's slice
        output [s, b, output_size], the same on every rank; with ``sequence_parallel`` its slice [s/t, b, output_size]

    Raises:
        ValueError: ``input_size`` is not a multiple of the group size.

    Source: Shoeybi et al. 2019, "Megatron-LM", section 3.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        bias: bool = True,
        group: Group = SINGLE,
        sequence_parallel: bool = False,
    ) -> None:
        super().__init__()
        self.group, self.sequence_parallel = group, sequence_parallel
        local_size = divide("input_size", input_size, group)
        start = group.rank * local_size
        self.weight = empty_weight((output_size, local_size), Shard((output_size, input_size), 1, start, local_size))
        set_matrices(self.weight)
        self.bias: nn.Parameter | None = None
        if bias:
            self.bias = set_shard(nn.Parameter(torch.zeros(output_size)), Shard((output_size,)))
            if sequence_parallel:
                set_partial(self.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.group.size == 1:
            return linear(x, self.weight, self.bias)
        partial_sum = linear(x, self.weight)
        y = leave_tensor_region(partial_sum, self.group, self.sequence_parallel, in_place=True)  # [s, b, output_size]
        return y if self.bias is None else add_bias(y, self.bias)  # after the sum, or b would be added t times


def vocab_range(vocab_size: int, group: Group, divisible_by: int = 1) -> tuple[int, int, int]:
    """Return (row count, first token id, real token count) for this rank's shard of the word table.

    The vocabulary may have any size. The table is padded to a multiple of ``divisible_by * t`` rows. Padding rows come
    last, are zero and are excluded from the softmax.
    """
    row_multiple = divisible_by * group.size
    num_rows = -(-vocab_size // row_multiple) * row_multiple // group.size
    start = min(group.rank * num_rows, vocab_size)
    return num_rows, start, min(num_rows, vocab_size - start)


class VocabParallelEmbedding(nn.Module):
    """Embedding table sharded by rows over the group; tokens in other ranks' shards contribute zero to the sum.

    Shapes:
        input  [...] token ids below ``vocab_size``
        output [..., h], the same on every rank; with ``sequence_parallel`` its slice along the first dimension
    """

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        *,
        divisible_by: int = 1,
        group: Group = SINGLE,
        sequence_parallel: bool = False,
    ) -> None:
        super().__init__()
        self.group, self.sequence_parallel = group, sequence_parallel
        num_rows, self.start, self.num_real = vocab_range(vocab_size, group, divisible_by)
        shard = Shard((vocab_size, hidden_size), 0, self.start, self.num_real)
        self.weight = empty_weight((num_rows, hidden_size), shard)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        if self.group.size == 1:
            return embedding_lookup(tokens, self.weight)
        local_ids = tokens - self.start
        is_remote = (local_ids < 0) | (local_ids >= self.num_real)
        rows = embedding_lookup(local_ids.masked_fill(is_remote, 0), self.weight)  # [..., h]
        local_rows = rows.masked_fill(is_remote.unsqueeze(-1), 0.0)
        return leave_tensor_region(local_rows, self.group, self.sequence_parallel, in_place=True)
