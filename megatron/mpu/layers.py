"""ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding; overlapped products."""

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
from tds.linear_function import is_deferring_weight_grads
from tds.param_info import info_of

# A product with a weight and a bias; in compiled layers on a CPU the bias by itself.
#
# Compiled on a CPU, torch's product with a bias first copies the bias to every row. Added by itself it joins what
# follows, as GELU or the sum with the residual, in one pass. Its gradient must not join what comes before it: for a sum
# over rows the compiler makes every summand a second time, column by column.
#
# | first product of the feed-forward layer and GELU, [4096, 512] to 2,048, fp32, 2 cores; ms | forward | backward |
# |---|---|---|
# | the products alone, of which backward has two | 24.4 | 50.1 |
# | the bias in the product | 30.6 | 60.0 |
# | the bias by itself, its gradient the compiler's sum | 28.4 | 67.8 |
# | the bias by itself, its gradient a product with ones: what is done here | 29.8 | 56.5 |
#
# The bias goes through an operator that lays it in every row, without copies, since an operator may have a gradient of
# its own and an autograd.Function would keep the compiled layer out of torch's cache.


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return ``x W^T + b``.

    Shapes:
        x      [..., input_size]
        weight [output_size, input_size], bias [output_size]
        output [..., output_size]
    """
    if bias is not None and _stands_alone(x):
        return plus_bias(F.linear(x, weight), bias)
    return tds.linear_function.linear(x, weight, bias)


BESIDE, WHOLE_TILES = 8, 64
"""Off the CPU logits have a multiple of the first in columns, which are 16 bytes or more, or are given the second."""


def aligned(columns: int, place: torch.device) -> int:
    """Return the columns that logits on ``place`` are made with, of which ``columns`` count."""
    if place.type == "cpu" or columns % BESIDE == 0:
        return columns
    return -(-columns // WHOLE_TILES) * WHOLE_TILES


def aligned_linear(x: torch.Tensor, table: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return ``x table^T + bias``, [..., v/t], by products that are aligned, those of the backward too."""
    rows = len(table)
    width = aligned(rows, x.device) if torch.is_grad_enabled() and table.requires_grad else rows
    if width == rows:
        return linear(x, table, bias)
    return F.linear(x, with_rows(table, width), None if bias is None else with_rows(bias, width))[..., :rows]


def with_rows(table: torch.Tensor, number: int) -> torch.Tensor:
    """Return the first ``number`` rows of ``table``, or all of them and zeros."""
    if len(table) >= number:
        return table[:number]
    return torch.cat([table, table.new_zeros(number - len(table), *table.shape[1:])])


def plus_bias(x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Return ``x + bias``, [..., h] and [h]."""
    return x + (_in_every_row(bias, x.shape) if _stands_alone(x) else bias)


def _stands_alone(x: torch.Tensor) -> bool:
    """Return whether a bias is added by itself: not in 16 bits, where torch's product rounds with it, once."""
    return torch.compiler.is_compiling() and x.device.type == "cpu" and x.dtype in (torch.float32, torch.float64)


@torch.library.custom_op("megatron_tds::in_every_row", mutates_args=())
def _in_every_row(bias: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    return bias.clone(memory_format=torch.contiguous_format).expand(shape)


@_in_every_row.register_fake
def _(bias: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    return torch.empty_like(bias, memory_format=torch.contiguous_format).expand(shape)


def _gradient(ctx: Any, grad: torch.Tensor) -> Any:
    """Return the sum over all rows as a product with ones, which is faster and as exact as the weight's gradient."""
    rows = grad.reshape(-1, grad.shape[-1])
    return rows.new_ones(1, len(rows)).mm(rows).squeeze(0), None


_in_every_row.register_autograd(_gradient)


# The products of a column-parallel layer; in the backward the tensor ranks talk while they compute.
#
# | | waits for | meanwhile |
# |---|---|---|
# | with the sequence cut: the parts of the input, joined again | the weight's gradient | the input's gradient |
# | the sum over the ranks of the input's gradient, or of its parts | the end | the weight's gradient |
#
# With the sequence cut the graph keeps this rank's part of the input, not the whole that the products have read.
#
# What comes out is to the bit what the same products give one after another. On GPUs kernels start in the order of
# their calls only with ``CUDA_DEVICE_MAX_CONNECTIONS=1``, as Megatron asks for too: it is set without a pipeline. With
# one receives are posted ahead and would hold up what comes after them: ``megatron.training.initialize`` asks for many
# queues. The sums are the same then and may start later.
#
# While a schedule defers weight gradients (``tds.engine.weight_grad_store``) no product is left to overlap with a
# collective, so the plain functions run one after another. They also run in a compiled layer, whose compiler orders
# them itself. With sequence parallelism their graph keeps the gathered input, s b h numbers instead of s b h / t, for
# attention and for the feed-forward half.
#
# Source: Korthikanti et al. 2022, "Reducing activation recomputation in large transformer models", section 4.2.2.

Pair = tuple[torch.Tensor, torch.Tensor | None]
"""A weight and its bias."""


def column_products(
    x: torch.Tensor, pairs: Sequence[Pair], group: Group, sequence_parallel: bool = False
) -> tuple[torch.Tensor, ...]:
    """Return ``X W^T + b`` for each of ``pairs``, whose weights are this rank's rows. Collective, the backward too.

    Shapes:
        x      [s, b, input_size], or [s/t, b, input_size] where ``sequence_parallel``
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
        half = len(leaves) // 2
        weights, biases = leaves[:half], leaves[half:]
        ctx.group, ctx.sequence_parallel = group, sequence_parallel
        ctx.leaves = weights  # themselves: recompute hands back detached copies of what is saved
        ctx.save_for_backward(x, *weights)
        whole = gather_from_sequence_region(x, group) if sequence_parallel else x
        return tuple(F.linear(whole, w, b) for w, b in zip(weights, biases, strict=True))  # type: ignore[arg-type]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        x, *weights = ctx.saved_tensors
        of_x, of_weights, of_biases = _needed(ctx.needs_input_grad, len(weights))
        joining = start_all_gather(x, ctx.group) if ctx.sequence_parallel and any(of_weights) else None
        rows = [grad.reshape(-1, grad.shape[-1]) for grad in grads]  # [s b, output_size/t] each
        summing = _start_sum(ctx, x, rows, weights) if of_x else None
        whole = x if joining is None else joining.wait()
        inputs = whole.reshape(-1, whole.shape[-1])  # [s b, input_size]
        made = [
            _of_weight(weight, each, inputs) if needed else None
            for weight, each, needed in zip(ctx.leaves, rows, of_weights, strict=True)
        ]
        made += [each.sum(0) if needed else None for each, needed in zip(rows, of_biases, strict=True)]
        return None if summing is None else summing.wait(), None, None, *made


def _needed(needs: Sequence[bool], number: int) -> tuple[bool, Sequence[bool], Sequence[bool]]:
    """Return which gradients autograd asks for: of the input, of ``number`` weights, of as many biases."""
    return needs[0], needs[3 : 3 + number], needs[3 + number :]


def _of_weight(weight: torch.Tensor, rows: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor | None:
    """Return the gradient of ``weight`` as autograd computes it; None where the product accumulates it in place.

    Of a weight whose rows are not contiguous autograd computes the transposed product, which need not have the same
    bits (MKL on AMD's processors).
    """
    add_product = info_of(weight).add_product
    if add_product is not None:
        add_product(rows, inputs)
        return None
    is_whole = weight.stride() == (weight.shape[1], 1)
    return rows.t().mm(inputs) if is_whole else inputs.t().mm(rows).t()


def _start_sum(ctx: Any, x: torch.Tensor, rows: Sequence[torch.Tensor], weights: Sequence[torch.Tensor]) -> AsyncHandle:
    """Compute this rank's summand of the input's gradient, and start its sum."""
    summand = rows[0].mm(weights[0])
    for each, weight in zip(rows[1:], weights[1:], strict=True):
        summand += each.mm(weight)
    if ctx.sequence_parallel:
        return start_reduce_scatter(summand.view(ctx.group.size * x.shape[0], *x.shape[1:]), ctx.group)
    return start_all_reduce(summand.view(x.shape), ctx.group)


# Linear layers and the embedding, cut over a tensor-parallel group that they take as an argument.
#
# Weights start as zeros and unset; ``megatron.models.common.parameters`` fills them from a counter keyed by seed and
# name, so that every layout starts from the same numbers.


def divide(name: str, size: int, group: Group) -> int:
    """Return ``size`` over the group size.

    Raises:
        ValueError: it does not divide.
    """
    if size % group.size:
        raise ValueError(
            f"{name} must be a multiple of --model-parallel-size, got {size} and {group.size}. "
            f"Choose a multiple of {group.size} or a smaller --model-parallel-size."
        )
    return size // group.size


class ColumnParallelLinear(nn.Module):
    """``Y = X A^T + b`` with A cut by its output rows: rank i holds A_i and returns Y_i = X A_i^T + b_i.

    Shapes:
        input  [s, b, input_size], the same on every rank; with ``sequence_parallel`` [s/t, b, input_size], its part
        output [s, b, output_size/t], or [s, b, output_size] with ``gather_output``

    Args:
        has_entered: the input comes from ``enter_tensor_region``, for several layers at once.

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
        self.shares = (0,) if has_entered else ()  # the gradient of the input, for the debugger
        local = divide("output_size", output_size, group)
        start = group.rank * local
        self.weight = empty_weight((local, input_size), Shard((output_size, input_size), 0, start, local))
        set_matrices(self.weight)
        self.bias: nn.Parameter | None = None
        if bias:
            self.bias = set_shard(nn.Parameter(torch.zeros(local)), Shard((output_size,), 0, start, local))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        (y,) = self.products(x, (self.weight, self.bias))  # [s, b, output_size/t]
        return gather_from_tensor_region(y, self.group) if self.gather_output else y

    def products(self, x: torch.Tensor, *pairs: Pair) -> tuple[torch.Tensor, ...]:
        """Return the product of ``x`` with each weight and bias. Collective."""
        if self.has_entered:
            return tuple(linear(x, weight, bias) for weight, bias in pairs)
        return column_products(x, pairs, self.group, self.sequence_parallel)


class RowParallelLinear(nn.Module):
    """``Y = X A^T + b`` with A cut by its input columns: the partial products of all ranks are summed, then b added.

    Shapes:
        input  [s, b, input_size/t], each rank its own slice
        output [s, b, output_size], the same on every rank; with ``sequence_parallel`` [s/t, b, output_size], its part

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
        local = divide("input_size", input_size, group)
        start = group.rank * local
        self.weight = empty_weight((output_size, local), Shard((output_size, input_size), 1, start, local))
        set_matrices(self.weight)
        self.bias: nn.Parameter | None = None
        if bias:
            self.bias = set_shard(nn.Parameter(torch.zeros(output_size)), Shard((output_size,)))
            if sequence_parallel:
                set_partial(self.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.group.size == 1:
            return linear(x, self.weight, self.bias)
        y = leave_tensor_region(linear(x, self.weight), self.group, self.sequence_parallel)  # [s, b, output_size]
        return y if self.bias is None else plus_bias(y, self.bias)  # after the sum: else the bias would count t times


def vocab_range(vocab_size: int, group: Group, divisible_by: int = 1) -> tuple[int, int, int]:
    """Return (rows held, first token, real tokens) of this rank for a vocabulary of any size.

    The table is padded to a multiple of ``divisible_by * t``; padded rows come last, are zero, and take no part in
    the softmax.
    """
    unit = divisible_by * group.size
    rows = -(-vocab_size // unit) * unit // group.size
    start = min(group.rank * rows, vocab_size)
    return rows, start, min(rows, vocab_size - start)


class VocabParallelEmbedding(nn.Module):
    """Rows of the embedding table cut over the group; tokens of other ranks contribute zero before the sum.

    Shapes:
        input  [...] token ids below ``vocab_size``
        output [..., h], the same on every rank; with ``sequence_parallel`` its part along the first dimension
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
        rows, self.start, self.num_real = vocab_range(vocab_size, group, divisible_by)
        shard = Shard((vocab_size, hidden_size), 0, self.start, self.num_real)
        self.weight = empty_weight((rows, hidden_size), shard)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        if self.group.size == 1:
            return embedding_lookup(tokens, self.weight)
        local = tokens - self.start
        elsewhere = (local < 0) | (local >= self.num_real)
        rows = embedding_lookup(local.masked_fill(elsewhere, 0), self.weight)  # [..., h]
        own = rows.masked_fill(elsewhere.unsqueeze(-1), 0.0)
        return leave_tensor_region(own, self.group, self.sequence_parallel)
