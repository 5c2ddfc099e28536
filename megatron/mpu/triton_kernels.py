"""Kernels for GPUs, in Triton. Imported where they are used: Triton comes with torch for CUDA, and not for CPUs.

Tests run them on a CPU by Triton's interpreter (``TRITON_INTERPRET=1``).
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["key", "threshold", "first_row", "first_sample", "first_plane", "first_column"])
def dropped(
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
    """Write ``residual + x * scale``, where the random word of an element is below ``threshold`` ``residual`` alone.

    A program works on ``GROUPS`` counters of one line, the last dimension. Lines are (row, sample) of hidden states
    [s, b, h], with ``inner`` = b, and (sample, head, row) of probabilities [b, a, s, s_k], ``inner`` = s, ``middle`` =
    a. Both are rounded where torch's operators one after another round.
    """
    line = tl.program_id(0)
    if IS_ATTENTION:
        row, plane, sample = line % inner, line // inner % middle, line // inner // middle
    else:
        row, plane, sample = line // inner, line * 0, line % inner
    group = first_column // 4 + tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    nothing = group * 0
    one, two, three, four = tl.philox(
        key.to(tl.int64),
        group.to(tl.uint32),
        (nothing + row + first_row).to(tl.uint32),
        (nothing + sample + first_sample).to(tl.uint32),
        (nothing + plane + first_plane).to(tl.uint32),
    )
    words = tl.interleave(tl.interleave(one, three), tl.interleave(two, four))  # [4 GROUPS], in the order of columns
    begin = first_column // 4 * 4 - first_column + tl.program_id(1) * GROUPS * 4
    column = begin + tl.arange(0, GROUPS * 4)
    place = line.to(tl.int64) * width + column
    is_here = (column >= 0) & (column < width)
    given = tl.load(x + place, mask=is_here, other=0.0)
    kept = (given.to(tl.float32) * scale).to(given.dtype)
    kept = tl.where(words.to(tl.int64) < threshold, 0.0, kept)
    if HAS_RESIDUAL:
        beside = tl.load(residual + place, mask=is_here, other=0.0)
        kept = (beside.to(tl.float32) + kept.to(tl.float32)).to(given.dtype)
    tl.store(out + place, kept, mask=is_here)
