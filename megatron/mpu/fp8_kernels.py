"""Triton kernels that quantize to FP8, launched by ``megatron.mpu.fp8_quantize``.

Quotients, products and casts are rounded like torch's operators, so the bytes equal those of a CPU. Maxima are computed
from the bits of the magnitudes as integers, which have the same order; NaN is the largest.
"""

from __future__ import annotations

import triton
import triton.language as tl

E4M3_MAX: tl.constexpr = tl.constexpr(448.0)  # as in megatron.mpu.fp8_quantize
MIN_MAXIMUM: tl.constexpr = tl.constexpr(1e-12)


@triton.jit
def row_maxima_kernel(x, maxima, width, BLOCK: tl.constexpr):
    """Write the largest magnitude of each row, one row per program; NaN if the row has a NaN."""
    row = tl.program_id(0).to(tl.int64)
    largest = tl.zeros((BLOCK,), tl.int32)
    start = 0
    while start < width:  # range(0, width) fails in Triton's interpreter with numpy 2.4
        column = start + tl.arange(0, BLOCK)
        value = tl.load(x + row * width + column, mask=column < width, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, tl.abs(value).to(tl.int32, bitcast=True))
        start += BLOCK
    tl.store(maxima + row, tl.max(largest, axis=0).to(tl.float32, bitcast=True))


@triton.jit
def column_maxima_kernel(x, maxima_bits, num_rows, width, ROWS: tl.constexpr, TILE: tl.constexpr):
    """Update ``maxima_bits``, initially 0, by the bits of the columns' largest magnitudes; NaN if a column has a NaN.

    A program processes ``ROWS`` rows of ``TILE`` columns of one matrix.
    """
    matrix = tl.program_id(2).to(tl.int64)
    x += matrix * num_rows * width
    maxima_bits += matrix * width
    column = tl.program_id(0) * TILE + tl.arange(0, TILE)
    largest = tl.zeros((TILE, TILE), tl.int32)
    for start in range(0, ROWS, TILE):
        row = tl.program_id(1) * ROWS + start + tl.arange(0, TILE)
        mask = (row[:, None] < num_rows) & (column[None, :] < width)
        offset = row[:, None].to(tl.int64) * width + column[None, :]
        value = tl.load(x + offset, mask=mask, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, tl.abs(value).to(tl.int32, bitcast=True))
    tl.atomic_max(maxima_bits + column, tl.max(largest, axis=0), mask=column < width)


@triton.jit
def quantize_rows_kernel(x, maxima, out, width, BLOCK: tl.constexpr):
    """Quantize with a scale per row, one row per program."""
    row = tl.program_id(0).to(tl.int64)
    inverse = _inverse_scale(tl.load(maxima + row))
    start = 0
    while start < width:  # range(0, width) fails in Triton's interpreter with numpy 2.4
        column = start + tl.arange(0, BLOCK)
        mask = column < width
        value = tl.load(x + row * width + column, mask=mask, other=0.0).to(tl.float32)
        tl.store(out + row * width + column, _cast(value * inverse, out), mask=mask)
        start += BLOCK


@triton.jit
def quantize_columns_kernel(x, maxima, out, num_rows, width, TILE: tl.constexpr):
    """Quantize with a scale per column and write the transpose, ``TILE`` x ``TILE`` elements per program."""
    matrix = tl.program_id(2).to(tl.int64)
    x += matrix * num_rows * width
    maxima += matrix * width
    out += matrix * num_rows * width
    row = tl.program_id(0) * TILE + tl.arange(0, TILE)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    mask = (row[:, None] < num_rows) & (column[None, :] < width)
    value = tl.load(x + row[:, None].to(tl.int64) * width + column[None, :], mask=mask, other=0.0).to(tl.float32)
    inverse = _inverse_scale(tl.load(maxima + column, mask=column < width, other=1.0))
    quantized = _cast(value * inverse[None, :], out)
    tl.store(out + column[:, None].to(tl.int64) * num_rows + row[None, :], tl.trans(quantized), mask=tl.trans(mask))


@triton.jit
def _inverse_scale(maximum):
    bounded = tl.maximum(maximum, MIN_MAXIMUM, propagate_nan=tl.PropagateNan.ALL)
    return tl.math.div_rn(tl.zeros_like(bounded) + E4M3_MAX, bounded)


@triton.jit
def _cast(value, out):
    clamped = tl.clamp(value, -E4M3_MAX, E4M3_MAX, propagate_nan=tl.PropagateNan.ALL)
    return clamped.to(out.dtype.element_ty)
