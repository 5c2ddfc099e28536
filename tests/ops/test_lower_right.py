"""Causal attention of the last queries of a sequence, against the same with a mask."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from megatron.ops.attention import attention, lower_right_attention
from tests.helpers.whole import random


@pytest.mark.parametrize(("queries", "before"), [(1, 0), (5, 0), (1, 6), (4, 5)])
@pytest.mark.parametrize("groups", [2, 4])
def test_values_and_gradients_are_those_with_a_mask(queries: int, before: int, groups: int) -> None:
    query = random(1, 2, 4, queries, 3).requires_grad_()
    key, value = (random(seed, 2, groups, before + queries, 3).requires_grad_() for seed in (2, 3))
    weights = random(4, 2, 4, queries, 3)
    mask = torch.ones(queries, before + queries, dtype=torch.bool).tril(before)[None, None]
    found = []
    for way in (lower_right_attention, partial(attention, mask=mask)):
        context = way(query, key, value, scale=0.3)
        found.append((context, *torch.autograd.grad((context * weights).sum(), (query, key, value))))
    for ours, theirs in zip(*found, strict=True):
        assert (ours - theirs).abs().max() <= 1e-12
