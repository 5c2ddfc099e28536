"""Triton kernels of LayerNorm and RMSNorm with a residual connection, launched by ``megatron.ops.fused_norm``."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def norm_forward_kernel(
    x,
    branch,
    weight,
    bias,
    total,
    out,
    mean,
    rstd,
    width,
    epsilon,
    HAS_BRANCH: tl.constexpr,
    IS_CENTRED: tl.constexpr,
    IS_OFFSET: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write ``total = x + branch`` and the norm of ``total`` (of ``x`` without ``HAS_BRANCH``), one row per program.

    The sum is rounded to its dtype first. The weight is the scale minus 1 with ``IS_OFFSET``; without ``IS_CENTRED``
    there is no mean.
    """
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    mask = column < width
    offset = row.to(tl.int64) * width + column
    loaded = tl.load(x + offset, mask=mask, other=0.0)
    if HAS_BRANCH:
        added = tl.load(branch + offset, mask=mask, other=0.0)
        loaded = (loaded.to(tl.float32) + added.to(tl.float32)).to(loaded.dtype)
        tl.store(total + offset, loaded, mask=mask)
    wide = loaded.to(tl.float32)
    if IS_CENTRED:
        row_mean = tl.sum(wide, axis=0) / width
        tl.store(mean + row, row_mean)
        wide = tl.where(mask, wide - row_mean, 0.0)
    factor = tl.rsqrt(tl.sum(wide * wide, axis=0) / width + epsilon)
    tl.store(rstd + row, factor)
    scale = tl.load(weight + column, mask=mask, other=0.0).to(tl.float32)
    if IS_OFFSET:
        scale += 1.0
    normed = wide * factor * scale
    if HAS_BIAS:
        normed += tl.load(bias + column, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + offset, normed.to(out.dtype.element_ty), mask=mask)


@triton.jit
def norm_backward_kernel(
    grad,
    total_grad,
    total,
    weight,
    mean,
    rstd,
    x_grad,
    weight_grads,
    bias_grads,
    num_rows,
    width,
    HAS_TOTAL_GRAD: tl.constexpr,
    IS_CENTRED: tl.constexpr,
    IS_OFFSET: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the gradient for ``total`` and, for a program's ``ROWS`` rows, the weight and bias gradients.

    ``grad`` is the norm's gradient, ``total_grad`` the gradient for ``total`` from the residual connection. A program
    sums its results in fp32.
    """
    program = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    mask = column < width
    scale = tl.load(weight + column, mask=mask, other=0.0).to(tl.float32)
    if IS_OFFSET:
        scale += 1.0
    weight_sum = tl.zeros((BLOCK,), dtype=tl.float32)
    bias_sum = tl.zeros((BLOCK,), dtype=tl.float32)
    for i in range(ROWS):
        row = program * ROWS + i
        is_row = row < num_rows
        offset = row.to(tl.int64) * width + column
        is_loaded = mask & is_row
        normed = tl.load(total + offset, mask=is_loaded, other=0.0).to(tl.float32)
        factor = tl.load(rstd + row, mask=is_row, other=0.0)
        if IS_CENTRED:
            normed = tl.where(mask, normed - tl.load(mean + row, mask=is_row, other=0.0), 0.0)
        normed *= factor
        out_grad = tl.load(grad + offset, mask=is_loaded, other=0.0).to(tl.float32)
        product = out_grad * normed  # used twice: with ``normed_grad * normed``, ptxas spills registers for sm_80
        weight_sum += product
        if HAS_BIAS:
            bias_sum += out_grad
        normed_grad = out_grad * scale
        result = normed_grad - normed * (tl.sum(product * scale, axis=0) / width)
        if IS_CENTRED:
            result -= tl.sum(normed_grad, axis=0) / width
        result *= factor
        if HAS_TOTAL_GRAD:
            result += tl.load(total_grad + offset, mask=is_loaded, other=0.0).to(tl.float32)
        tl.store(x_grad + offset, result.to(x_grad.dtype.element_ty), mask=is_loaded)
    partial = program.to(tl.int64) * width + column
    tl.store(weight_grads + partial, weight_sum, mask=mask)
    if HAS_BIAS:
        tl.store(bias_grads + partial, bias_sum, mask=mask)
