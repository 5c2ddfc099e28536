"""Attention whose scores are not scaled, with a bias that depends on the distance between query and key alone.

The 2s - 1 numbers of a head are all that autograd sees of the bias; they are spread to [s, s] where they are added.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from megatron.ops.attention import Drop, additive, dropped_attention

BLOCK = 2**20
"""Scores that are worked on at a time on a CPU: few enough to stay in its caches from one step to the next."""
KEPT = 2**24
"""Probabilities that a layer may keep for backward on a CPU; above it they are made once more there."""


def biased_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    by_distance: torch.Tensor | None = None,
    *,
    mask: torch.Tensor | None = None,
    dropout: float = 0.0,
    drop: Drop | None = None,
) -> torch.Tensor:
    """Return ``softmax(q k^T + bias) v``. A query that may look nowhere looks everywhere alike: no NaN.

    Shapes:
        query  [b, a/t, s, d]
        key, value [b, a/t, s_k, d]
        by_distance [a/t, 2s - 1], for key minus query position from -(s - 1) to s - 1, where s_k is s; None: no bias
        mask   bool [b or 1, 1, s, s_k], True where a query may look
        output [b, a/t, s, d]

    Args:
        drop: drops probabilities in place of ``dropout``.

    Source: Raffel et al. 2020, "Exploring the limits of transfer learning", section 2.1.
    """
    if is_blocked(query) and not dropout and drop is None:
        return _BlockedAttention.apply(query, key, value, by_distance, None if mask is None else ~mask)
    added = None if mask is None else additive(mask, query.dtype)
    if by_distance is not None:
        bias = spread(by_distance).unsqueeze(0)  # [1, a/t, s, s]
        added = bias if mask is None else bias.masked_fill(~mask, torch.finfo(bias.dtype).min)  # [b, a/t, s, s]
    if drop is not None:
        return dropped_attention(query, key, value, added, drop=drop, scale=1.0)
    return F.scaled_dot_product_attention(query, key, value, attn_mask=added, dropout_p=dropout, scale=1.0)


def is_blocked(x: torch.Tensor) -> bool:
    """Return whether ``x`` goes block by block: on CPUs, where torch is slow as soon as a bias needs a gradient."""
    return x.device.type == "cpu" and x.dtype in (torch.float32, torch.float64)


def without_future(by_distance: torch.Tensor) -> torch.Tensor:
    """Return the bias with the lowest number for keys to the right of the query: the causal rule, for nothing.

    Shapes:
        by_distance, output [a, 2s - 1]
    """
    size = by_distance.shape[1]
    future = torch.arange(size, device=by_distance.device) > size // 2
    return by_distance.masked_fill(future, torch.finfo(by_distance.dtype).min)


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
        return _diagonal_sums(grads[0])


def _spread(by_distance: torch.Tensor) -> torch.Tensor:
    size = (by_distance.shape[1] + 1) // 2
    windows = by_distance.contiguous().unfold(1, size, 1)  # [a, s, s], row k from distance k - (s - 1) on
    return windows.flip(1)


def _diagonal_sums(matrices: torch.Tensor) -> torch.Tensor:
    """Return the sums along the diagonals of [a, s, s] as [a, 2s - 1]: the transpose of ``_spread``.

    Row i of a matrix is put down i places to the left, in rows of 2s, so that columns are distances.
    """
    size = matrices.shape[-1]
    rows = matrices.new_zeros(size, 2 * size)
    square = rows.as_strided((size, size), (2 * size - 1, 1), size - 1)
    sums = matrices.new_empty(matrices.shape[0], 2 * size)
    for matrix, own in zip(matrices, sums, strict=True):
        square.copy_(matrix)
        torch.sum(rows, dim=0, out=own)
    return sums[:, :-1]


class _Block(NamedTuple):
    """Whole samples where one fits, else some heads of one: in both cases neighbours among all heads of all samples."""

    part: slice  # of [b a, ...]
    samples: slice
    heads: slice


class _BlockedAttention(torch.autograd.Function):
    """Scores become probabilities in place, block by block; beyond ``KEPT`` no [b, a, s, s_k] is ever in memory.

    torch's own attention, in the same case, makes several tensors of that size and goes over each from end to end.
    """

    @staticmethod
    def forward(ctx: Any, query: Any, key: Any, value: Any, by_distance: Any, hidden: Any) -> torch.Tensor:
        context = torch.empty_like(query, memory_format=torch.contiguous_format)
        bias = None if by_distance is None else _spread(by_distance)  # [a, s, s]
        blocks, size = _blocks(query, key)
        is_kept = any(ctx.needs_input_grad) and query[..., 0].numel() * key.shape[2] <= KEPT
        kept = query.new_empty(query.shape[0] * query.shape[1] if is_kept else size, query.shape[2], key.shape[2])
        for block in blocks:
            q, k, v, own = (_flat(x)[block.part] for x in (query, key, value, context))
            probabilities = kept[block.part] if is_kept else kept[: q.shape[0]]  # [n, s, s_k]
            _set_probabilities(probabilities, q, k, bias, hidden, block)
            torch.bmm(probabilities, v, out=own)
        ctx.save_for_backward(query, key, value, by_distance, hidden, kept if is_kept else None)
        return context

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        query, key, value, by_distance, hidden, kept = ctx.saved_tensors
        found = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in (query, key, value)]
        bias = None if by_distance is None or kept is not None else _spread(by_distance)
        to_bias = None if by_distance is None else query.new_empty(query.shape[1], query.shape[2], key.shape[2])
        blocks, size = _blocks(query, key)
        again = query.new_empty(0 if kept is not None else size, query.shape[2], key.shape[2])
        scratch = query.new_empty(size, query.shape[2], key.shape[2])
        for block in blocks:
            q, k, v, grad, to_q, to_k, to_v = (_flat(x)[block.part] for x in (query, key, value, grads[0], *found))
            probabilities = again[: q.shape[0]] if kept is None else kept[block.part]
            if kept is None:
                _set_probabilities(probabilities, q, k, bias, hidden, block)
            torch.bmm(probabilities.transpose(1, 2), grad, out=to_v)
            scores = scratch[: q.shape[0]]  # their gradient; first that of the probabilities
            torch.bmm(grad, v.transpose(1, 2), out=scores)
            torch.ops.aten._softmax_backward_data.out(scores, probabilities, -1, scores.dtype, grad_input=scores)
            torch.bmm(scores, k, out=to_q)
            torch.bmm(scores.transpose(1, 2), q, out=to_k)
            if to_bias is not None:
                _add_samples(to_bias[block.heads], scores, is_first=block.samples.start == 0)
        return (*found, None if to_bias is None else _diagonal_sums(to_bias), None)


def _add_samples(total: torch.Tensor, scores: torch.Tensor, *, is_first: bool) -> None:
    """Add [heads, s, s] of each sample of a block to ``total``, which is empty before the first."""
    samples = scores.split(total.shape[0])
    if is_first:
        total.copy_(samples[0])
    for sample in samples[1:] if is_first else samples:
        total.add_(sample)


def _blocks(query: torch.Tensor, key: torch.Tensor) -> tuple[list[_Block], int]:
    """Return the blocks and the number of heads in the largest."""
    num_samples, num_heads = query.shape[:2]
    size = max(1, BLOCK // (query.shape[2] * key.shape[2]))
    if size < num_heads:
        parts = [(i, j) for i in range(num_samples) for j in range(0, num_heads, size)]
        ends = [(i + 1, min(j + size, num_heads)) for i, j in parts]
    else:
        size -= size % num_heads
        parts = [(i, 0) for i in range(0, num_samples, size // num_heads)]
        ends = [(min(i + size // num_heads, num_samples), num_heads) for i, _ in parts]
    blocks = [
        _Block(slice(i * num_heads + j, (i_end - 1) * num_heads + j_end), slice(i, i_end), slice(j, j_end))
        for (i, j), (i_end, j_end) in zip(parts, ends, strict=True)
    ]
    return blocks, min(size, num_samples * num_heads)


def _flat(x: torch.Tensor) -> torch.Tensor:
    return x.flatten(0, 1)


def _set_probabilities(
    scores: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    bias: torch.Tensor | None,
    hidden: torch.Tensor | None,
    block: _Block,
) -> None:
    """Put the softmax of the scores of a block into ``scores``; the lowest number stands for one that is ``hidden``.

    Shapes:
        scores [n, s, s_k]
        query, key [n, s or s_k, d]
        bias   [a, s, s]
        hidden [b or 1, 1, s, s_k]
    """
    each = (-1, block.heads.stop - block.heads.start)
    if bias is None:
        torch.bmm(query, key.transpose(1, 2), out=scores)
    else:
        scores.unflatten(0, each).copy_(bias[block.heads])
        scores.baddbmm_(query, key.transpose(1, 2))
    if hidden is not None:
        own = hidden if hidden.shape[0] == 1 else hidden[block.samples]
        scores.unflatten(0, each).masked_fill_(own, torch.finfo(scores.dtype).min)
    torch.softmax(scores, dim=-1, out=scores)
