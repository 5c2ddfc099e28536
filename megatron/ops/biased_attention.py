"""Attention with a bias that depends on the distance between query and key alone.

The 2s - 1 numbers of a head are all that autograd sees; where they are spread to [s, s] it is in memory of one block.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F

BLOCK = 2**20
"""Scores that are in memory at a time on a CPU: few enough to stay in its caches from one step to the next."""


def biased_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    by_distance: torch.Tensor,
    *,
    mask: torch.Tensor | None = None,
    is_causal: bool = False,
    dropout: float = 0.0,
) -> torch.Tensor:
    """Return ``softmax(q k^T + bias) v``, not scaled.

    Shapes:
        query, key, value [b, a/t, s, d]
        by_distance [a/t, 2s - 1], for key minus query position from -(s - 1) to s - 1
        mask   bool [b or 1, 1, s, s], True where a query may look; each must be allowed to see itself
        output [b, a/t, s, d]

    Source: Raffel et al. 2020, "Exploring the limits of transfer learning", section 2.1.
    """
    lowest = torch.finfo(by_distance.dtype).min
    if is_causal:
        future = torch.arange(by_distance.shape[1], device=by_distance.device) >= query.shape[2]
        by_distance = by_distance.masked_fill(future, lowest)
    if on_cpu(query) and not dropout:
        return _BlockedAttention.apply(query, key, value, by_distance, None if mask is None else ~mask)
    bias = spread(by_distance).unsqueeze(0)  # [1, a/t, s, s]
    if mask is not None:
        bias = bias.masked_fill(~mask, lowest)  # [b, a/t, s, s]
    return F.scaled_dot_product_attention(query, key, value, attn_mask=bias, dropout_p=dropout, scale=1.0)


def on_cpu(x: torch.Tensor) -> bool:
    """Return whether ``x`` is where torch's own attention is slow as soon as a bias needs a gradient."""
    return x.device.type == "cpu"


def spread(by_distance: torch.Tensor) -> torch.Tensor:
    """Return the matrix of each head whose entry (i, j) is that of the distance j - i.

    Shapes:
        by_distance [a, 2s - 1]
        output      [a, s, s]
    """
    return _Spread.apply(by_distance)


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, by_distance: torch.Tensor) -> torch.Tensor:
        return _spread(by_distance)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        sums = _DiagonalSums(grads[0])
        sums.add(grads[0], slice(None))
        return sums.total().to(grads[0].dtype)


def _spread(by_distance: torch.Tensor) -> torch.Tensor:
    size = (by_distance.shape[1] + 1) // 2
    windows = by_distance.contiguous().unfold(1, size, 1)  # [a, s, s], row k from distance k - (s - 1) on
    return windows.flip(1)


class _DiagonalSums:
    """Sums along the diagonals of matrices: the transpose of ``spread``.

    Row i is put down i places to the left, in a buffer of rows of 2s, so that its columns are the distances.
    """

    def __init__(self, like: torch.Tensor) -> None:
        heads, size = like.shape[-3], like.shape[-1]
        dtype = torch.promote_types(like.dtype, torch.float32)
        self.rows = torch.zeros((heads, size, 2 * size), dtype=dtype, device=like.device)
        self.square = self.rows.as_strided((heads, size, size), (2 * size * size, 2 * size - 1, 1), size - 1)

    def add(self, matrices: torch.Tensor, heads: slice) -> None:
        self.square[heads].add_(matrices)

    def total(self) -> torch.Tensor:
        return self.rows.sum(dim=1)[:, :-1]  # [a, 2s - 1]


class _BlockedAttention(torch.autograd.Function):
    """Probabilities are made block by block, and once more in backward: no [b, a, s, s] is ever in memory."""

    @staticmethod
    def forward(ctx: Any, query: Any, key: Any, value: Any, by_distance: Any, hidden: Any) -> torch.Tensor:
        ctx.save_for_backward(query, key, value, by_distance, hidden)
        context = torch.empty_like(query, memory_format=torch.contiguous_format)
        bias = _spread(by_distance)  # [a, s, s]
        for samples, heads in _blocks(*query.shape[:3]):
            q, k, v = (_flat(x[samples, heads]) for x in (query, key, value))
            torch.bmm(_probabilities(q, k, bias[heads], hidden, samples), v, out=_flat(context[samples, heads]))
        return context

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        query, key, value, by_distance, hidden = ctx.saved_tensors
        found = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in (query, key, value)]
        bias = _spread(by_distance)
        sums = _DiagonalSums(bias)
        for samples, heads in _blocks(*query.shape[:3]):
            q, k, v, grad = (_flat(x[samples, heads]) for x in (query, key, value, grads[0]))
            to_q, to_k, to_v = (_flat(x[samples, heads]) for x in found)
            probabilities = _probabilities(q, k, bias[heads], hidden, samples)  # [n, s, s]
            torch.bmm(probabilities.transpose(1, 2), grad, out=to_v)
            scores = torch.bmm(grad, v.transpose(1, 2))  # the gradient, of the probabilities and then of the scores
            torch.ops.aten._softmax_backward_data.out(scores, probabilities, -1, scores.dtype, grad_input=scores)
            torch.bmm(scores, k, out=to_q)
            torch.bmm(scores.transpose(1, 2), q, out=to_k)
            for sample in scores.unflatten(0, (-1, bias[heads].shape[0])):
                sums.add(sample, heads)
        return (*found, sums.total().to(by_distance.dtype), None)


def _blocks(num_samples: int, num_heads: int, size: int) -> Iterator[tuple[slice, slice]]:
    """Yield (samples, heads) of each block: whole samples where one fits, else some heads of one."""
    heads = min(num_heads, max(1, BLOCK // size**2))
    samples = max(1, BLOCK // (num_heads * size**2))
    for i in range(0, num_samples, samples):
        for j in range(0, num_heads, heads):
            yield slice(i, i + samples), slice(j, j + heads)


def _flat(x: torch.Tensor) -> torch.Tensor:
    return x.flatten(0, 1)


def _probabilities(
    query: torch.Tensor, key: torch.Tensor, bias: torch.Tensor, hidden: torch.Tensor | None, samples: slice
) -> torch.Tensor:
    """Return [n, s, s] of a block of n heads, those of ``bias`` for each sample in turn."""
    heads, size = bias.shape[0], bias.shape[-1]
    scores = bias.repeat(query.shape[0] // heads, 1, 1).baddbmm_(query, key.transpose(1, 2))  # [n, s, s]
    if hidden is not None:
        own = hidden if hidden.shape[0] == 1 else hidden[samples]
        scores.view(-1, heads, size, size).masked_fill_(own, torch.finfo(scores.dtype).min)
    return torch.softmax(scores, dim=-1, out=scores)
