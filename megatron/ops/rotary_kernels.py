"""Triton kernel for rotary positions, launched by ``megatron.ops.fused_rotary``."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def rotary_kernel(
    query,
    key,
    value,
    query_out,
    key_out,
    value_out,
    cosine,
    sine,
    batch_size,
    query_s,
    query_b,
    query_g,
    query_a,
    key_s,
    key_b,
    key_g,
    value_s,
    value_b,
    value_g,
    query_out_s,
    query_out_b,
    query_out_g,
    query_out_a,
    key_out_s,
    key_out_b,
    key_out_g,
    value_out_s,
    value_out_b,
    value_out_g,
    angle_s,
    angle_b,
    NUM_GROUPS: tl.constexpr,
    HEADS_PER_GROUP: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    NUM_PAIRS: tl.constexpr,
    IS_INVERSE: tl.constexpr,
    HAS_VALUE: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_GROUPS: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    """Rotate the first ``NUM_PAIRS`` pairs in a token's heads, and copy the values if ``HAS_VALUE``.

    A program processes one token. Queries are [s, b, g, a/g, d], keys and values [s, b, g, d], cosine and sine [s, b,
    d/2]; ``query_s`` is the query stride along s, and so on. Columns are contiguous. With ``IS_INVERSE`` the angles are
    negated.
    """
    token = tl.program_id(0).to(tl.int64)
    s, b = token // batch_size, token % batch_size
    pair = tl.arange(0, BLOCK_PAIRS)
    angle = s * angle_s + b * angle_b + pair
    cos = tl.load(cosine + angle, mask=pair < NUM_PAIRS, other=0.0)[None, :]
    sin = tl.load(sine + angle, mask=pair < NUM_PAIRS, other=0.0)[None, :]
    if IS_INVERSE:
        sin = -sin
    query += s * query_s + b * query_b
    query_out += s * query_out_s + b * query_out_b
    for first_head in range(0, NUM_GROUPS * HEADS_PER_GROUP, BLOCK_HEADS):
        head = (first_head + tl.arange(0, BLOCK_HEADS))[:, None]
        is_head = head < NUM_GROUPS * HEADS_PER_GROUP
        group = (head // HEADS_PER_GROUP).to(tl.int64)
        head_in_group = (head % HEADS_PER_GROUP).to(tl.int64)
        x = query + group * query_g + head_in_group * query_a
        out = query_out + group * query_out_g + head_in_group * query_out_a
        _rotate(x, out, is_head, cos, sin, HEAD_SIZE, NUM_PAIRS, BLOCK_PAIRS, BLOCK_REST)
    key += s * key_s + b * key_b
    key_out += s * key_out_s + b * key_out_b
    value += s * value_s + b * value_b
    value_out += s * value_out_s + b * value_out_b
    for first_group in range(0, NUM_GROUPS, BLOCK_GROUPS):
        group = (first_group + tl.arange(0, BLOCK_GROUPS)).to(tl.int64)[:, None]
        is_group = group < NUM_GROUPS
        _rotate(
            key + group * key_g, key_out + group * key_out_g, is_group, cos, sin,
            HEAD_SIZE, NUM_PAIRS, BLOCK_PAIRS, BLOCK_REST,
        )  # fmt: skip
        if HAS_VALUE:
            column = tl.arange(0, BLOCK_COLUMNS)[None, :]
            mask = is_group & (column < HEAD_SIZE)
            x = tl.load(value + group * value_g + column, mask=mask)
            tl.store(value_out + group * value_out_g + column, x, mask=mask)


@triton.jit
def _rotate(
    x,
    out,
    is_head,
    cos,
    sin,
    HEAD_SIZE: tl.constexpr,
    NUM_PAIRS: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr,
    BLOCK_REST: tl.constexpr,
):
    """Rotate the heads that start at ``x`` into ``out`` (both [heads, 1]); the columns after the pairs are copied."""
    pair = tl.arange(0, BLOCK_PAIRS)[None, :]
    mask = is_head & (pair < NUM_PAIRS)
    first = tl.load(x + pair, mask=mask, other=0.0)
    second = tl.load(x + NUM_PAIRS + pair, mask=mask, other=0.0)
    wide_first, wide_second = first.to(tl.float32), second.to(tl.float32)
    tl.store(out + pair, (wide_first * cos - wide_second * sin).to(first.dtype), mask=mask)
    tl.store(out + NUM_PAIRS + pair, (wide_second * cos + wide_first * sin).to(first.dtype), mask=mask)
    if HEAD_SIZE > 2 * NUM_PAIRS:
        column = 2 * NUM_PAIRS + tl.arange(0, BLOCK_REST)[None, :]
        is_rest = is_head & (column < HEAD_SIZE)
        tl.store(out + column, tl.load(x + column, mask=is_rest), mask=is_rest)
