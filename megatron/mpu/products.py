"""The products of a column-parallel layer; in the backward the tensor ranks talk while they compute.

| | waits for | meanwhile |
|---|---|---|
| with the sequence cut: the parts of the input, joined again | the weight's gradient | the input's gradient |
| the sum over the ranks of the input's gradient, or of its parts | the end | the weight's gradient |

With the sequence cut the graph keeps this rank's part of the input, not the whole that the products have read.

What comes out is to the bit what the same products give one after another. On GPUs kernels start in the order of their
calls only with ``CUDA_DEVICE_MAX_CONNECTIONS=1``, as Megatron asks for too: set it without a pipeline. With one
receives are posted ahead and would hold up what comes after them: ``megatron.training.world`` asks for many queues. The
sums are the same then and may start later.

A schedule that puts the gradients of weights off (``tds.split``) does so by swapping ``torch.nn.functional.linear``.
There is no product then to hide a message behind, and it must see the call: the plain functions run, one after another.
So they do in a compiled layer, whose compiler orders them itself. With the sequence cut their graph keeps the joined
input, s b h numbers in place of s b h / t, for attention and for the feed-forward half.

Source: Korthikanti et al. 2022, "Reducing activation recomputation in large transformer models", section 4.2.2.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from megatron.mpu.groups import Group
from megatron.mpu.linear import linear
from megatron.mpu.mappings import (
    Underway,
    enter_tensor_region,
    gather_from_sequence_region,
    start_all_reduce,
    start_joining,
    start_summing_parts,
)

_OWN_LINEAR = F.linear

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
    is_swapped = F.linear is not _OWN_LINEAR
    if group.size == 1 or is_swapped or torch.compiler.is_compiling():
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
        ctx.save_for_backward(x, *weights)
        whole = gather_from_sequence_region(x, group) if sequence_parallel else x
        return tuple(F.linear(whole, w, b) for w, b in zip(weights, biases, strict=True))  # type: ignore[arg-type]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        x, *weights = ctx.saved_tensors
        of_x, of_weights, of_biases = _needed(ctx.needs_input_grad, len(weights))
        joining = start_joining(x, ctx.group) if ctx.sequence_parallel and any(of_weights) else None
        rows = [grad.reshape(-1, grad.shape[-1]) for grad in grads]  # [s b, output_size/t] each
        summing = _start_sum(ctx, x, rows, weights) if of_x else None
        whole = x if joining is None else joining.wait()
        inputs = whole.reshape(-1, whole.shape[-1])  # [s b, input_size]
        made = [
            _of_weight(weight, each, inputs) if needed else None
            for weight, each, needed in zip(weights, rows, of_weights, strict=True)
        ]
        made += [each.sum(0) if needed else None for each, needed in zip(rows, of_biases, strict=True)]
        return None if summing is None else summing.wait(), None, None, *made


def _needed(needs: Sequence[bool], number: int) -> tuple[bool, Sequence[bool], Sequence[bool]]:
    """Return which gradients autograd asks for: of the input, of ``number`` weights, of as many biases."""
    return needs[0], needs[3 : 3 + number], needs[3 + number :]


def _of_weight(weight: torch.Tensor, rows: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
    """Return the gradient of ``weight`` as autograd makes it: of one whose rows lie apart by the transposed product.

    The two need not be the same bits (MKL on AMD's processors).
    """
    is_whole = weight.stride() == (weight.shape[1], 1)
    return rows.t().mm(inputs) if is_whole else inputs.t().mm(rows).t()


def _start_sum(ctx: Any, x: torch.Tensor, rows: Sequence[torch.Tensor], weights: Sequence[torch.Tensor]) -> Underway:
    """Compute this rank's summand of the input's gradient, and start its sum."""
    summand = rows[0].mm(weights[0])
    for each, weight in zip(rows[1:], weights[1:], strict=True):
        summand += each.mm(weight)
    if ctx.sequence_parallel:
        return start_summing_parts(summand.view(ctx.group.size * x.shape[0], *x.shape[1:]), ctx.group)
    return start_all_reduce(summand.view(x.shape), ctx.group)
