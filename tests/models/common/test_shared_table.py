"""A shared table's gradient is the sum over all of its uses, and dense."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from megatron.models.common.language_model import shared_table
from tests.helpers.whole import random_tensor

V, H = 9, 4
TOKENS = [torch.tensor([[1, 1, 3], [8, 0, 1]]), torch.tensor([3, 3])]
USES = {"rows": (True, False), "product": (False, True), "both": (True, True)}


def table_gradients(uses, is_shared):
    weight = random_tensor(1, V, H).requires_grad_()
    row_weight, product_weight = shared_table(weight) if is_shared else (weight, weight)
    losses = []
    if uses[0]:
        losses += [
            (F.embedding(tokens, row_weight, sparse=is_shared) * random_tensor(2, *tokens.shape, H)).sum()
            for tokens in TOKENS
        ]
    if uses[1]:
        losses.append((random_tensor(3, 5, H) @ product_weight.t()).square().sum())
    sum(losses).backward(retain_graph=True)
    first_grad = weight.grad.clone()
    sum(losses).backward()  # what is kept for a second backward is not what the first has added to
    return first_grad, weight.grad


@pytest.mark.parametrize("uses", USES.values(), ids=USES)
def test_shared_table_gradient_matches_single_table(uses):
    for actual, expected in zip(table_gradients(uses, True), table_gradients(uses, False), strict=True):
        assert actual.layout == torch.strided
        assert (actual - expected).abs().max() <= 1e-13 * expected.abs().max()
