"""Attention with a relative position bias (T5)."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from megatron.ops.attention import Drop, additive, attention, dropped_attention, lowest

# A bias by the distance between query and key: the 2s - 1 numbers of a head, and the matrix [s, s] that they make.
#
# The numbers are all that autograd sees of the bias; they are spread where they are added to scores.


def without_future(by_distance: torch.Tensor) -> torch.Tensor:
    """Return the bias with the lowest number for keys to the right of the query: the causal rule, for nothing.

    Shapes:
        by_distance, output [a, 2s - 1]
    """
    size = by_distance.shape[1]
    future = torch.arange(size, device=by_distance.device) > size // 2
    return by_distance.masked_fill(future, lowest(by_distance.dtype))


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
        return spread_values(by_distance)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return diagonal_sums(grads[0])


def spread_values(by_distance: torch.Tensor) -> torch.Tensor:
    """Return ``spread``, not seen by autograd."""
    size = (by_distance.shape[1] + 1) // 2
    windows = by_distance.contiguous().unfold(1, size, 1)  # [a, s, s], row k from distance k - (s - 1) on
    return windows.flip(1)


def diagonal_sums(matrices: torch.Tensor) -> torch.Tensor:
    """Return the sums along the diagonals of [a, s, s] as [a, 2s - 1]: the transpose of ``spread_values``.

    On a CPU the heads take turns in memory that stays in its caches; elsewhere turns would be kernels too small.
    """
    return sums_of_some(matrices, 1 if matrices.device.type == "cpu" else len(matrices))


def sums_of_some(matrices: torch.Tensor, at_once: int) -> torch.Tensor:
    """Return ``diagonal_sums``, made of so many heads at once; their number is a multiple of it.

    Row i of a matrix is put down i places to the left, in rows of 2s, so that columns are distances.
    """
    size = matrices.shape[-1]
    rows = matrices.new_zeros(at_once, size, 2 * size)
    squares = rows.as_strided((at_once, size, size), (2 * size * size, 2 * size - 1, 1), size - 1)
    sums = matrices.new_empty(matrices.shape[0], 2 * size)
    for first in range(0, len(matrices), max(at_once, 1)):
        squares.copy_(matrices[first : first + at_once])
        torch.sum(rows, dim=1, out=sums[first : first + at_once])
    return sums[:, :-1]


# Attention whose scores are not scaled, with a bias that depends on the distance between query and key alone.
#
# On a CPU it is an operator (``torch.library``) that goes block by block, one node to ``--compile``.

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
        tensors = [each for each in (query, key, value, by_distance) if each is not None]
        has_backward = torch.is_grad_enabled() and any(each.requires_grad for each in tensors)
        keeps = has_backward and query[..., 0].numel() * key.shape[2] <= KEPT
        return _forward(query, key, value, by_distance, None if mask is None else ~mask, keeps)[0]
    added = None if mask is None else additive(mask, query.dtype)
    if by_distance is not None:
        bias = spread(by_distance).unsqueeze(0)  # [1, a/t, s, s]
        added = bias if mask is None else bias.masked_fill(~mask, lowest(bias.dtype))  # [b, a/t, s, s]
    if drop is not None:
        return dropped_attention(query, key, value, added, drop=drop, scale=1.0)
    return attention(query, key, value, mask=added, is_causal=False, dropout=dropout, scale=1.0)


def is_blocked(x: torch.Tensor) -> bool:
    """Return whether attention of ``x`` goes block by block: on CPUs, where torch is slow, most of all with a bias."""
    return x.device.type == "cpu" and x.dtype in (torch.float32, torch.float64)


class _Block(NamedTuple):
    """Whole samples where one fits, else some heads of one: in both cases neighbours among all heads of all samples."""

    part: slice  # of [b a, ...]
    samples: slice
    heads: slice


@torch.library.custom_op("megatron_tds::biased_attention", mutates_args=())
def _forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    by_distance: torch.Tensor | None,
    hidden: torch.Tensor | None,
    keeps: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the context and, if it ``keeps`` them, the probabilities [b a, s, s_k]; else no numbers.

    Scores become probabilities in place, block by block; beyond ``KEPT`` no [b, a, s, s_k] is ever in memory. torch's
    own attention, in the same case, makes several tensors of that size and goes over each from end to end.
    """
    context = torch.empty_like(query, memory_format=torch.contiguous_format)
    bias = None if by_distance is None else spread_values(by_distance)  # [a, s, s]
    blocks, size = _blocks(query, key)
    kept = query.new_empty(_kept_shape(query, key, keeps))
    spare = kept if keeps else query.new_empty(size, query.shape[2], key.shape[2])
    for block in blocks:
        q, k, v, own = (_flat(x)[block.part] for x in (query, key, value, context))
        probabilities = kept[block.part] if keeps else spare[: q.shape[0]]  # [n, s, s_k]
        _set_probabilities(probabilities, q, k, bias, hidden, block)
        torch.bmm(probabilities, v, out=own)
    return context, kept


@torch.library.custom_op("megatron_tds::biased_attention_backward", mutates_args=())
def _backward(
    gradient: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    by_distance: torch.Tensor | None,
    hidden: torch.Tensor | None,
    kept: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of query, key, value and bias; no numbers for the last where there is none."""
    found = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in (query, key, value)]
    keeps = kept.numel() > 0
    bias = None if by_distance is None or keeps else spread_values(by_distance)
    to_bias = None if by_distance is None else query.new_empty(query.shape[1], query.shape[2], key.shape[2])
    blocks, size = _blocks(query, key)
    again = query.new_empty(0 if keeps else size, query.shape[2], key.shape[2])
    scratch = query.new_empty(size, query.shape[2], key.shape[2])
    for block in blocks:
        q, k, v, grad, to_q, to_k, to_v = (_flat(x)[block.part] for x in (query, key, value, gradient, *found))
        probabilities = kept[block.part] if keeps else again[: q.shape[0]]
        if not keeps:
            _set_probabilities(probabilities, q, k, bias, hidden, block)
        torch.bmm(probabilities.transpose(1, 2), grad, out=to_v)
        scores = scratch[: q.shape[0]]  # their gradient; first that of the probabilities
        torch.bmm(grad, v.transpose(1, 2), out=scores)
        torch.ops.aten._softmax_backward_data.out(scores, probabilities, -1, scores.dtype, grad_input=scores)
        torch.bmm(scores, k, out=to_q)
        torch.bmm(scores.transpose(1, 2), q, out=to_k)
        if to_bias is not None:
            _add_samples(to_bias[block.heads], scores, is_first=block.samples.start == 0)
    to_query, to_key, to_value = found
    return to_query, to_key, to_value, query.new_empty(0) if to_bias is None else diagonal_sums(to_bias).contiguous()


def _kept_shape(query: torch.Tensor, key: torch.Tensor, keeps: bool) -> tuple[int, int, int]:
    return (query.shape[0] * query.shape[1] if keeps else 0, query.shape[2], key.shape[2])


@_forward.register_fake
def _(
    query: Tensor, key: Tensor, value: Tensor, by_distance: Tensor | None, hidden: Tensor | None, keeps: bool
) -> tuple[Tensor, Tensor]:
    context = torch.empty_like(query, memory_format=torch.contiguous_format)
    return context, query.new_empty(_kept_shape(query, key, keeps))


@_backward.register_fake
def _(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    by_distance: Tensor | None,
    hidden: Tensor | None,
    kept: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    to_query, to_key, to_value = (
        torch.empty_like(x, memory_format=torch.contiguous_format) for x in (query, key, value)
    )
    return to_query, to_key, to_value, query.new_empty((0,) if by_distance is None else by_distance.shape)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    *tensors, _ = inputs
    ctx.save_for_backward(*tensors, output[1])
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)  # else zeros as many as the probabilities are made


def _gradient(ctx: Any, grad: torch.Tensor, _: Any) -> tuple[torch.Tensor | None, ...]:
    tensors = ctx.saved_tensors
    to_query, to_key, to_value, to_bias = _backward(grad, *tensors)
    return to_query, to_key, to_value, None if tensors[3] is None else to_bias, None, None


_forward.register_autograd(_gradient, setup_context=_remember)


def _products(query: torch.Size, key: torch.Size) -> int:
    """Return the FLOPs of a product of every query with every key."""
    b, a, s, d = query
    return 2 * b * a * s * key[2] * d


@register_flop_formula(torch.ops.megatron_tds.biased_attention)
def _flops(query: torch.Size, key: torch.Size, *_: Any, **__: Any) -> int:
    return 2 * _products(query, key)


@register_flop_formula(torch.ops.megatron_tds.biased_attention_backward)
def _flops_of_backward(
    gradient: torch.Size, query: torch.Size, key: torch.Size, value: Any, bias: Any, hidden: Any, kept: Any, **_: Any
) -> int:
    return (4 if kept[0] else 5) * _products(query, key)


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
        scores.unflatten(0, each).masked_fill_(own, lowest(scores.dtype))
    torch.softmax(scores, dim=-1, out=scores)
