"""Causal attention of the last queries of a sequence, against the same with a mask."""

from __future__ import annotations

from functools import partial
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron.ops import lower_right_attention as ops
from megatron.ops.attention import attention
from tests.helpers.whole import random


@given(
    queries=st.integers(1, 7), before=st.integers(0, 9), groups=st.sampled_from([1, 2, 4]), block=st.integers(1, 4),
    scale=st.sampled_from([None, 0.3]),
)  # fmt: skip
def test_values_and_gradients_are_those_with_a_mask(
    queries: int, before: int, groups: int, block: int, scale: float | None
) -> None:
    query = random(1, 2, 4, queries, 3).requires_grad_()
    key, value = (random(seed, 2, groups, before + queries, 3).requires_grad_() for seed in (2, 3))
    weights = random(4, 2, 4, queries, 3)
    mask = torch.ones(queries, before + queries, dtype=torch.bool).tril(before)[None, None]
    found = []
    with patch.dict(ops.QUERIES, cpu=block):
        for way in (ops.lower_right_attention, partial(attention, mask=mask)):
            context = way(query, key, value, scale=scale)
            found.append((context, *torch.autograd.grad((context * weights).sum(), (query, key, value))))
    for ours, theirs in zip(*found, strict=True):
        assert (ours - theirs).abs().max() <= 1e-12


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_16_bits_are_multiplied_in_fp32(dtype: torch.dtype) -> None:
    parts = [random(seed, 1, heads, length, 8) for seed, heads, length in ((1, 4, 6), (2, 2, 20), (3, 2, 20))]
    wide = ops.lower_right_attention(*parts)
    narrow = [part.to(dtype).requires_grad_() for part in parts]
    context = ops.lower_right_attention(*narrow)
    context.float().sum().backward()
    assert context.dtype == dtype and all(part.grad.dtype == dtype for part in narrow)
    assert (context - wide).abs().max() <= (1e-6 if dtype == torch.float32 else 0.03)
