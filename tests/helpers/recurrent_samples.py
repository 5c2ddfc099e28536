"""Inputs of recurrent operators: document starts drawn by hypothesis, and values with their gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from hypothesis import strategies as st


def draw_starts(draw: Any, batch: int, length: int) -> torch.Tensor:
    """Draw document starts int32 [batch, length]; the first document of a row starts at 0 or before."""
    rows = []
    for _ in range(batch):
        first = draw(st.sampled_from([0, -1, -2, -7]))
        later = draw(st.sets(st.integers(1, max(length - 1, 1)), max_size=4))
        is_start = torch.tensor([idx in later for idx in range(length)])
        rows.append(torch.where(is_start, torch.arange(length), first).cummax(0).values)
    return torch.stack(rows).int()


def make_starts(length: int, rows: list[list[int]]) -> torch.Tensor:
    """Return document starts int32 [b, length], given the indices of the first tokens of each row."""
    is_start = torch.zeros(len(rows), length, dtype=torch.bool)
    for idx, row in enumerate(rows):
        is_start[idx, row] = True
    return torch.where(is_start, torch.arange(length), 0).cummax(1).values.int()


def values_and_grads(
    function: Callable[..., Any], inputs: Sequence[torch.Tensor], *args: Any, **kwargs: Any
) -> list[torch.Tensor]:
    """Return the outputs of ``function`` and the gradients of all ``inputs``, for fixed gradients of the outputs."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    outputs = function(*leaves, *args, **kwargs)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    generator = torch.Generator().manual_seed(99)
    loss = sum((y * torch.randn(y.shape, generator=generator, dtype=torch.float64).to(y.dtype)).sum() for y in outputs)
    grads = torch.autograd.grad(loss, leaves, allow_unused=True)
    zeros = [torch.zeros_like(leaf) for leaf in leaves]
    return [*outputs, *(zero if grad is None else grad for grad, zero in zip(grads, zeros, strict=True))]


def worst_difference(actual: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> float:
    """Return the largest difference, relative to the largest element of each expected tensor where that exceeds 1."""
    return max(
        ((x - y).abs().max() / y.abs().max().clamp(min=1.0)).item() if y.numel() else 0.0
        for x, y in zip(actual, expected, strict=True)
    )
