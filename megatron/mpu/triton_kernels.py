"""Triton kernels for GPUs. Imported on use only, because builds of torch for CPUs do not include Triton.

Tests run the kernels on a CPU with Triton's interpreter (``TRITON_INTERPRET=1``).
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["key", "threshold", "first_row", "first_sample", "first_plane", "first_column"])
def dropout_kernel(
    x,
    residual,
    out,
    key,
    threshold,
    scale,
    width,
    inner,
    middle,
    first_row,
    first_sample,
    first_plane,
    first_column,
    HAS_RESIDUAL: tl.constexpr,
    IS_ATTENTION: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """Write ``residual + x * scale``, or only ``residual`` for elements with a random word below ``threshold``.

    A program processes ``GROUPS`` counters in one line, a vector along the last dimension. The lines of hidden states
    [s, b, h] are (row, sample), with ``inner`` = b; those of probabilities [b, a, s, s_k] are (sample, head, row), with
    ``inner`` = s and ``middle`` = a. Product and sum are rounded separately, as by torch's operators.
    """
    line = tl.program_id(0)
    if IS_ATTENTION:
        row, plane, sample = line % inner, line // inner % middle, line // inner // middle
    else:
        row, plane, sample = line // inner, line * 0, line % inner
    group = first_column // 4 + tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    zeros = group * 0
    words_0, words_1, words_2, words_3 = tl.philox(
        key.to(tl.int64),
        group.to(tl.uint32),
        (zeros + row + first_row).to(tl.uint32),
        (zeros + sample + first_sample).to(tl.uint32),
        (zeros + plane + first_plane).to(tl.uint32),
    )
    words = tl.interleave(
        tl.interleave(words_0, words_2), tl.interleave(words_1, words_3)
    )  # [4 GROUPS], in the order of columns
    begin = first_column // 4 * 4 - first_column + tl.program_id(1) * GROUPS * 4
    column = begin + tl.arange(0, GROUPS * 4)
    offset = line.to(tl.int64) * width + column
    is_in_line = (column >= 0) & (column < width)
    value = tl.load(x + offset, mask=is_in_line, other=0.0)
    result = (value.to(tl.float32) * scale).to(value.dtype)
    result = tl.where(words.to(tl.int64) < threshold, 0.0, result)
    if HAS_RESIDUAL:
        skip = tl.load(residual + offset, mask=is_in_line, other=0.0)
        result = (skip.to(tl.float32) + result.to(tl.float32)).to(value.dtype)
    tl.store(out + offset, result, mask=is_in_line)
