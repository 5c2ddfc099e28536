"""Triton kernels for the cross-entropy. Imported on use only, because builds of torch for CPUs do not include Triton.

``megatron.mpu.fused_cross_entropy`` launches them. Tests run them on a CPU with Triton's interpreter.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def load_logits(logits, bias, columns, is_loaded, cap, HAS_BIAS: tl.constexpr, HAS_CAP: tl.constexpr):
    """Load ``columns`` of a logits row in fp32, add the bias, and cap to ``cap * tanh(logit / cap)``.

    Columns that are not loaded are 0.
    """
    logit = tl.load(logits + columns, mask=is_loaded, other=0.0).to(tl.float32)
    if HAS_BIAS:
        logit += tl.load(bias + columns, mask=is_loaded, other=0.0).to(tl.float32)
    if HAS_CAP:
        logit = cap * (2.0 * tl.sigmoid(2.0 * logit / cap) - 1.0)
    return logit


@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["targets", "statistics"])
def statistics_kernel(
    logits,
    bias,
    targets,
    statistics,
    num_rows,
    row_stride,
    width,
    num_columns,
    cap,
    HAS_BIAS: tl.constexpr,
    HAS_CAP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write a row's maximum, sum of exponentials and target's logit to ``statistics`` [3, num_rows].

    A program reads one row once, in blocks. The sum is kept as ``BLOCK`` partial sums relative to the maximum so far.
    """
    row = tl.program_id(0)
    logits += row.to(tl.int64) * row_stride
    row_max = tl.full([], -3.4e38, tl.float32)  # finite, because the difference of two infinities is NaN
    sums = tl.zeros([BLOCK], tl.float32)
    start = 0
    while start < num_columns:  # not a range, whose bound Triton's interpreter cannot convert with numpy 2.4
        columns = start + tl.arange(0, BLOCK)
        # the width of the matrix is a multiple of 16 far more often than the number of columns: then loads are wide
        logit = load_logits(logits, bias, columns, columns < width, cap, HAS_BIAS, HAS_CAP)
        logit = tl.where(columns < num_columns, logit, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(logit, axis=0))
        sums = sums * tl.exp(row_max - new_max) + tl.exp(logit - new_max)
        row_max = new_max
        start += BLOCK
    target = tl.load(targets + row)
    is_local = (target >= 0) & (target < num_columns)
    target_logit = load_logits(logits, bias, target, is_local, cap, HAS_BIAS, HAS_CAP)
    tl.store(statistics + row, row_max)
    tl.store(statistics + num_rows + row, tl.sum(sums, axis=0))
    tl.store(statistics + 2 * num_rows + row, target_logit)


@triton.jit(do_not_specialize_on_alignment=["targets", "maxima", "exp_factors", "factors"])
def gradient_kernel(
    logits,
    bias,
    targets,
    maxima,
    exp_factors,
    factors,
    gradient,
    row_stride,
    gradient_stride,
    width,
    num_columns,
    cap,
    HAS_BIAS: tl.constexpr,
    HAS_CAP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the gradient for ``BLOCK`` logits in one row, and zeros to the columns from ``num_columns``.

    ``gradient`` may be ``logits`` itself.
    """
    row = tl.program_id(0)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    logit = load_logits(logits + row.to(tl.int64) * row_stride, bias, columns, columns < width, cap, HAS_BIAS, HAS_CAP)
    grad = tl.exp(logit - tl.load(maxima + row)) * tl.load(exp_factors + row)
    grad -= tl.where(columns == tl.load(targets + row).to(tl.int32), tl.load(factors + row), 0.0)
    if HAS_CAP:
        grad *= 1.0 - (logit / cap) * (logit / cap)
    grad = tl.where(columns < num_columns, grad, 0.0)
    gradient += row.to(tl.int64) * gradient_stride
    tl.store(gradient + columns, grad.to(gradient.dtype.element_ty), mask=columns < width)
