"""Causal attention of the last queries of a sequence, against the same with a mask."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from megatron.ops.attention import attention, lower_right_attention
from tests.helpers.whole import random_tensor


@pytest.mark.parametrize(("num_queries", "num_cached"), [(1, 0), (5, 0), (1, 6), (4, 5)])
@pytest.mark.parametrize("num_groups", [2, 4])
def test_values_and_gradients_match_mask(num_queries: int, num_cached: int, num_groups: int) -> None:
    query = random_tensor(1, 2, 4, num_queries, 3).requires_grad_()
    key, value = (random_tensor(seed, 2, num_groups, num_cached + num_queries, 3).requires_grad_() for seed in (2, 3))
    weights = random_tensor(4, 2, 4, num_queries, 3)
    mask = torch.ones(num_queries, num_cached + num_queries, dtype=torch.bool).tril(num_cached)[None, None]
    results = []
    for function in (lower_right_attention, partial(attention, mask=mask)):
        context = function(query, key, value, scale=0.3)
        results.append((context, *torch.autograd.grad((context * weights).sum(), (query, key, value))))
    for actual, expected in zip(*results, strict=True):
        assert (actual - expected).abs().max() <= 1e-12


def test_dropout_removes_probabilities_and_scales_the_others() -> None:
    torch.manual_seed(0)
    query, key = random_tensor(1, 2, 4, 40, 3), random_tensor(2, 2, 4, 70, 3)
    value = torch.eye(70, dtype=torch.float64).expand(2, 4, 70, 70)  # attention returns the probabilities
    probabilities, dropped = (lower_right_attention(query, key, value, dropout=rate) for rate in (0.0, 0.25))
    is_kept = dropped != 0
    assert (dropped - probabilities / 0.75)[is_kept].abs().max() <= 1e-12
    assert is_kept[probabilities != 0].double().mean().item() == pytest.approx(0.75, abs=0.02)
