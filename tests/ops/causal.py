"""Causal attention by its formula, and what a function of packed heads gives, for tests of its forms on a CPU."""

from __future__ import annotations

from collections.abc import Callable

import torch

from megatron.ops.causal_attention import split_packed
from tests.helpers.whole import random_tensor


def make_packed(s: int, b: int, a: int, d: int) -> torch.Tensor:
    return random_tensor(1, s, b, a, 3, d)


def formula(packed: torch.Tensor) -> torch.Tensor:
    """Return the attention of each query, made by itself."""
    query, key, value = split_packed(packed)
    rows = []
    for i in range(query.shape[2]):
        scores = (key[:, :, : i + 1] @ query[:, :, i, :, None]).squeeze(-1) / packed.shape[-1] ** 0.5  # [b, a, i + 1]
        rows.append((scores.softmax(dim=-1).unsqueeze(-2) @ value[:, :, : i + 1]).squeeze(-2))
    return torch.stack(rows, dim=2)


def run_with_gradient(function: Callable[[torch.Tensor], torch.Tensor], packed: torch.Tensor) -> list[torch.Tensor]:
    """Return the output and the gradient."""
    leaf = packed.detach().clone().requires_grad_()
    output = function(leaf)
    output.backward(random_tensor(7, *output.shape).to(packed.dtype))
    assert leaf.grad is not None
    return [output.detach(), leaf.grad]
