"""A shared table's gradient is the sum over all of its uses, and dense."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from megatron.models.common.language_model import shared_table
from tests.helpers.whole import random

V, H = 9, 4
TOKENS = [torch.tensor([[1, 1, 3], [8, 0, 1]]), torch.tensor([3, 3])]
USES = {"rows": (True, False), "product": (False, True), "both": (True, True)}


def gradient(uses, is_shared):
    weight = random(1, V, H).requires_grad_()
    rows, rest = shared_table(weight) if is_shared else (weight, weight)
    parts = []
    if uses[0]:
        parts += [
            (F.embedding(tokens, rows, sparse=is_shared) * random(2, *tokens.shape, H)).sum() for tokens in TOKENS
        ]
    if uses[1]:
        parts.append((random(3, 5, H) @ rest.t()).square().sum())
    sum(parts).backward(retain_graph=True)
    first = weight.grad.clone()
    sum(parts).backward()  # what is kept for a second backward is not what the first has added to
    return first, weight.grad


@pytest.mark.parametrize("uses", USES.values(), ids=USES)
def test_the_gradient_is_that_of_one_table(uses):
    for found, expected in zip(gradient(uses, True), gradient(uses, False), strict=True):
        assert found.layout == torch.strided
        assert (found - expected).abs().max() <= 1e-13 * expected.abs().max()
