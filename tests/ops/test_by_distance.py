"""A bias by distance: matrices of numbers, and the sums along their diagonals."""

from __future__ import annotations

import pytest
import torch

from megatron.ops.biased_attention import diagonal_sums, spread, sums_of_some
from tests.helpers.whole import random

HEADS, SIZE = 6, 5


@pytest.mark.parametrize("at_once", [1, 2, HEADS], ids=["a head", "two heads", "all heads"])
def test_diagonals_are_added_up_by_some_heads_at_once_as_one_by_one(at_once: int) -> None:
    matrices = random(1, HEADS, SIZE, SIZE)
    wanted = [[m.diagonal(d).sum() for d in range(1 - SIZE, SIZE)] for m in matrices]
    found = sums_of_some(matrices, at_once)
    assert found.shape == (HEADS, 2 * SIZE - 1)
    assert (found - torch.tensor(wanted, dtype=found.dtype)).abs().max() <= 1e-14


def test_no_heads_have_no_sums() -> None:
    assert diagonal_sums(torch.empty(0, SIZE, SIZE)).shape == (0, 2 * SIZE - 1)
    assert sums_of_some(torch.empty(0, SIZE, SIZE), 0).shape == (0, 2 * SIZE - 1)


def test_the_gradient_of_a_spread_bias_is_its_sums() -> None:
    by_distance = random(2, HEADS, 2 * SIZE - 1).requires_grad_()
    assert torch.autograd.gradcheck(spread, by_distance)
