"""Attention with a relative position bias (T5)."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from megatron.ops.attention import Drop, additive_mask, attention, attention_with_dropout, mask_value

# A bias by the distance between query and key: 2s - 1 values per head, which define a matrix [s, s].
#
# Autograd sees only these values. They are spread into a matrix when they are added to scores.


def mask_future(by_distance: torch.Tensor) -> torch.Tensor:
    """Mask the bias with ``mask_value`` for keys after the query, so that no separate causal mask is needed.

    Shapes:
        by_distance, output [a, 2s - 1]
    """
    size = by_distance.shape[1]
    is_future = torch.arange(size, device=by_distance.device) > size // 2
    return by_distance.masked_fill(is_future, mask_value(by_distance.dtype))


def expand_bias(by_distance: torch.Tensor) -> torch.Tensor:
    """Expand the bias to one matrix per head, whose entry (i, j) is the bias at distance j - i.

    Shapes:
        by_distance [a, 2s - 1]
        output      [a, s, s]
    """
    return _ExpandBias.apply(by_distance)


class _ExpandBias(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, by_distance: torch.Tensor) -> torch.Tensor:
        return expand_bias_values(by_distance)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return diagonal_sums(grads[0])


def expand_bias_values(by_distance: torch.Tensor) -> torch.Tensor:
    """Compute ``expand_bias`` without autograd."""
    size = (by_distance.shape[1] + 1) // 2
    windows = by_distance.contiguous().unfold(1, size, 1)  # [a, s, s], row k from distance k - (s - 1) on
    return windows.flip(1)


def diagonal_sums(matrices: torch.Tensor) -> torch.Tensor:
    """Sum [a, s, s] along the diagonals to [a, 2s - 1]: the transpose of ``expand_bias_values``.

    On a CPU, heads are processed one at a time in memory that stays in cache. On other devices all heads are processed
    together, because a kernel for one head would be too small.
    """
    return diagonal_sums_by_heads(matrices, 1 if matrices.device.type == "cpu" else len(matrices))


def diagonal_sums_by_heads(matrices: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Compute ``diagonal_sums`` for ``num_heads`` heads at a time, which must divide the head count.

    Row i of a matrix is shifted by i columns to the left within rows of length 2s, so that each column contains a
    single distance.
    """
    size = matrices.shape[-1]
    rows = matrices.new_zeros(num_heads, size, 2 * size)
    shifted = rows.as_strided((num_heads, size, size), (2 * size * size, 2 * size - 1, 1), size - 1)
    totals = matrices.new_empty(matrices.shape[0], 2 * size)
    for first in range(0, len(matrices), max(num_heads, 1)):
        shifted.copy_(matrices[first : first + num_heads])
        torch.sum(rows, dim=1, out=totals[first : first + num_heads])
    return totals[:, :-1]


# Attention with unscaled scores and a bias that depends only on the distance between query and key.
#
# On a CPU it is a custom operator (``torch.library``) that works block by block, a single node for ``--compile``.

BLOCK_SCORES = 2**20
"""Number of scores computed at a time on a CPU, small enough to stay in its caches between operations."""
MAX_SAVED_PROBABILITIES = 2**24
"""Number of probabilities that a layer may save for backward on a CPU. If there are more, backward recomputes them."""


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
    """Return ``softmax(q k^T + bias) v``. A query that may attend to no key attends to all keys equally (no NaN).

    Shapes:
        query  [b, a/t, s, d]
        key, value [b, a/t, s_k, d]
        by_distance [a/t, 2s - 1], bias of key minus query position from -(s - 1) to s - 1, with s_k = s; None: no bias
        mask   bool [b or 1, 1, s, s_k], True where a query may attend
        output [b, a/t, s, d]

    Args:
        drop: dropout of probabilities, used instead of ``dropout``.

    Source: Raffel et al. 2020, "Exploring the limits of transfer learning", section 2.1.
    """
    if is_blocked(query) and not dropout and drop is None:
        tensors = [tensor for tensor in (query, key, value, by_distance) if tensor is not None]
        has_backward = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
        saves_probabilities = has_backward and query[..., 0].numel() * key.shape[2] <= MAX_SAVED_PROBABILITIES
        return _forward(query, key, value, by_distance, None if mask is None else ~mask, saves_probabilities)[0]
    bias_and_mask = None if mask is None else additive_mask(mask, query.dtype)
    if by_distance is not None:
        bias = expand_bias(by_distance).unsqueeze(0)  # [1, a/t, s, s]
        bias_and_mask = bias if mask is None else bias.masked_fill(~mask, mask_value(bias.dtype))  # [b, a/t, s, s]
    if drop is not None:
        return attention_with_dropout(query, key, value, bias_and_mask, drop=drop, scale=1.0)
    return attention(query, key, value, mask=bias_and_mask, is_causal=False, dropout=dropout, scale=1.0)


def is_blocked(x: torch.Tensor) -> bool:
    """Return True if attention works block by block: in fp32 and fp64 on a CPU.

    torch's attention is slow in these cases, especially with a bias.
    """
    return x.device.type == "cpu" and x.dtype in (torch.float32, torch.float64)


class _Block(NamedTuple):
    """Heads that are processed together: all heads of one or more samples if they fit, otherwise some of one sample."""

    flat_heads: slice  # of [b a, ...]
    samples: slice
    heads: slice


@torch.library.custom_op("megatron_tds::biased_attention", mutates_args=())
def _forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    by_distance: torch.Tensor | None,
    is_masked: torch.Tensor | None,
    saves_probabilities: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the context and probabilities [b a, s, s_k], which are empty without ``saves_probabilities``.

    Scores become probabilities in place, block by block. With more than ``MAX_SAVED_PROBABILITIES`` probabilities no
    tensor [b, a, s, s_k] is allocated, whereas torch's attention allocates several tensors of that size and passes over
    each of them.

    Args:
        is_masked: bool [b or 1, 1, s, s_k], True where a query may not attend.
    """
    context = torch.empty_like(query, memory_format=torch.contiguous_format)
    bias = None if by_distance is None else expand_bias_values(by_distance)  # [a, s, s]
    blocks, size = _blocks(query, key)
    saved = query.new_empty(_saved_shape(query, key, saves_probabilities))
    buffer = saved if saves_probabilities else query.new_empty(size, query.shape[2], key.shape[2])
    for block in blocks:
        q, k, v, block_context = (_flatten_heads(x)[block.flat_heads] for x in (query, key, value, context))
        probabilities = saved[block.flat_heads] if saves_probabilities else buffer[: q.shape[0]]  # [n, s, s_k]
        _set_probabilities(probabilities, q, k, bias, is_masked, block)
        torch.bmm(probabilities, v, out=block_context)
    return context, saved


@torch.library.custom_op("megatron_tds::biased_attention_backward", mutates_args=())
def _backward(
    gradient: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    by_distance: torch.Tensor | None,
    is_masked: torch.Tensor | None,
    saved_probabilities: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return gradients for query, key, value and bias; the last is empty if there is no bias."""
    grads = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in (query, key, value)]
    saves_probabilities = saved_probabilities.numel() > 0
    bias = None if by_distance is None or saves_probabilities else expand_bias_values(by_distance)
    bias_grad = None if by_distance is None else query.new_empty(query.shape[1], query.shape[2], key.shape[2])
    blocks, size = _blocks(query, key)
    recomputed = query.new_empty(0 if saves_probabilities else size, query.shape[2], key.shape[2])
    buffer = query.new_empty(size, query.shape[2], key.shape[2])
    for block in blocks:
        q, k, v, context_grad, q_grad, k_grad, v_grad = (
            _flatten_heads(x)[block.flat_heads] for x in (query, key, value, gradient, *grads)
        )
        probabilities = saved_probabilities[block.flat_heads] if saves_probabilities else recomputed[: q.shape[0]]
        if not saves_probabilities:
            _set_probabilities(probabilities, q, k, bias, is_masked, block)
        torch.bmm(probabilities.transpose(1, 2), context_grad, out=v_grad)
        score_grads = buffer[: q.shape[0]]  # gradient of the probabilities, later of the scores
        torch.bmm(context_grad, v.transpose(1, 2), out=score_grads)
        torch.ops.aten._softmax_backward_data.out(
            score_grads, probabilities, -1, score_grads.dtype, grad_input=score_grads
        )
        torch.bmm(score_grads, k, out=q_grad)
        torch.bmm(score_grads.transpose(1, 2), q, out=k_grad)
        if bias_grad is not None:
            _add_samples(bias_grad[block.heads], score_grads, is_first=block.samples.start == 0)
    query_grad, key_grad, value_grad = grads
    return (
        query_grad,
        key_grad,
        value_grad,
        query.new_empty(0) if bias_grad is None else diagonal_sums(bias_grad).contiguous(),
    )


def _saved_shape(query: torch.Tensor, key: torch.Tensor, saves_probabilities: bool) -> tuple[int, int, int]:
    return (query.shape[0] * query.shape[1] if saves_probabilities else 0, query.shape[2], key.shape[2])


@_forward.register_fake
def _(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    by_distance: Tensor | None,
    is_masked: Tensor | None,
    saves_probabilities: bool,
) -> tuple[Tensor, Tensor]:
    context = torch.empty_like(query, memory_format=torch.contiguous_format)
    return context, query.new_empty(_saved_shape(query, key, saves_probabilities))


@_backward.register_fake
def _(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    by_distance: Tensor | None,
    is_masked: Tensor | None,
    saved_probabilities: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    to_query, to_key, to_value = (
        torch.empty_like(x, memory_format=torch.contiguous_format) for x in (query, key, value)
    )
    return to_query, to_key, to_value, query.new_empty((0,) if by_distance is None else by_distance.shape)


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    *tensors, _ = inputs
    ctx.save_for_backward(*tensors, output[1])
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)  # otherwise autograd allocates zeros of the size of the probabilities


def _gradient(ctx: Any, grad: torch.Tensor, _: Any) -> tuple[torch.Tensor | None, ...]:
    tensors = ctx.saved_tensors
    query_grad, key_grad, value_grad, bias_grad = _backward(grad, *tensors)
    return query_grad, key_grad, value_grad, None if tensors[3] is None else bias_grad, None, None


_forward.register_autograd(_gradient, setup_context=_save_for_backward)


def _product_flops(query: torch.Size, key: torch.Size) -> int:
    b, a, s, d = query
    return 2 * b * a * s * key[2] * d


@register_flop_formula(torch.ops.megatron_tds.biased_attention)
def _flops(query: torch.Size, key: torch.Size, *_: Any, **__: Any) -> int:
    return 2 * _product_flops(query, key)


@register_flop_formula(torch.ops.megatron_tds.biased_attention_backward)
def _flops_of_backward(
    gradient: torch.Size,
    query: torch.Size,
    key: torch.Size,
    value: Any,
    bias: Any,
    is_masked: Any,
    saved_probabilities: Any,
    **_: Any,
) -> int:
    return (4 if saved_probabilities[0] else 5) * _product_flops(query, key)


def _add_samples(total: torch.Tensor, scores: torch.Tensor, *, is_first: bool) -> None:
    """Add a block's scores [heads, s, s] to ``total``, sample by sample; with ``is_first`` overwrite ``total``."""
    samples = scores.split(total.shape[0])
    if is_first:
        total.copy_(samples[0])
    for sample in samples[1:] if is_first else samples:
        total.add_(sample)


def _blocks(query: torch.Tensor, key: torch.Tensor) -> tuple[list[_Block], int]:
    """Return the blocks, and the number of heads in the largest block."""
    num_samples, num_heads = query.shape[:2]
    size = max(1, BLOCK_SCORES // (query.shape[2] * key.shape[2]))
    if size < num_heads:
        firsts = [(i, j) for i in range(num_samples) for j in range(0, num_heads, size)]
        ends = [(i + 1, min(j + size, num_heads)) for i, j in firsts]
    else:
        size -= size % num_heads
        firsts = [(i, 0) for i in range(0, num_samples, size // num_heads)]
        ends = [(min(i + size // num_heads, num_samples), num_heads) for i, _ in firsts]
    blocks = [
        _Block(slice(i * num_heads + j, (i_end - 1) * num_heads + j_end), slice(i, i_end), slice(j, j_end))
        for (i, j), (i_end, j_end) in zip(firsts, ends, strict=True)
    ]
    return blocks, min(size, num_samples * num_heads)


def _flatten_heads(x: torch.Tensor) -> torch.Tensor:
    return x.flatten(0, 1)


def _set_probabilities(
    scores: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    bias: torch.Tensor | None,
    is_masked: torch.Tensor | None,
    block: _Block,
) -> None:
    """Replace a block's ``scores`` by their softmax; ``is_masked`` scores are set to ``mask_value``.

    Shapes:
        scores [n, s, s_k]
        query, key [n, s or s_k, d]
        bias   [a, s, s]
        is_masked bool [b or 1, 1, s, s_k]
    """
    by_sample = (-1, block.heads.stop - block.heads.start)
    if bias is None:
        torch.bmm(query, key.transpose(1, 2), out=scores)
    else:
        scores.unflatten(0, by_sample).copy_(bias[block.heads])
        scores.baddbmm_(query, key.transpose(1, 2))
    if is_masked is not None:
        block_mask = is_masked if is_masked.shape[0] == 1 else is_masked[block.samples]
        scores.unflatten(0, by_sample).masked_fill_(block_mask, mask_value(scores.dtype))
    torch.softmax(scores, dim=-1, out=scores)
