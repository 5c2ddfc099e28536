"""A bias by distance: matrices of numbers, and the sums along their diagonals."""

from __future__ import annotations

import pytest
import torch

from megatron.ops.biased_attention import diagonal_sums, diagonal_sums_by_heads, expand_bias
from tests.helpers.whole import random_tensor

HEADS, SIZE = 6, 5


@pytest.mark.parametrize("at_once", [1, 2, HEADS], ids=["a head", "two heads", "all heads"])
def test_diagonal_sums_do_not_depend_on_heads_per_block(at_once: int) -> None:
    matrices = random_tensor(1, HEADS, SIZE, SIZE)
    expected = [[matrix.diagonal(offset).sum() for offset in range(1 - SIZE, SIZE)] for matrix in matrices]
    actual = diagonal_sums_by_heads(matrices, at_once)
    assert actual.shape == (HEADS, 2 * SIZE - 1)
    assert (actual - torch.tensor(expected, dtype=actual.dtype)).abs().max() <= 1e-14


def test_no_heads_give_no_sums() -> None:
    assert diagonal_sums(torch.empty(0, SIZE, SIZE)).shape == (0, 2 * SIZE - 1)
    assert diagonal_sums_by_heads(torch.empty(0, SIZE, SIZE), 0).shape == (0, 2 * SIZE - 1)


def test_spread_passes_gradcheck() -> None:
    by_distance = random_tensor(2, HEADS, 2 * SIZE - 1).requires_grad_()
    assert torch.autograd.gradcheck(expand_bias, by_distance)
