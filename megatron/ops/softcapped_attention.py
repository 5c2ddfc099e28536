"""Attention with soft-capped scores, computed for some heads at a time."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from megatron.ops.attention import Drop, additive_mask, attention_with_dropout, causal_mask, mask_value, repeat_kv

# The scores and probabilities of some heads are in memory at a time and are recomputed in backward; nothing of size
# [s, s_k] is saved. It is a custom operator (``torch.library``), a single node for ``--compile``. torch's fused kernels
# do not support a cap, and its flex_attention has no backward on a CPU.

MAX_SCORES_CPU, MAX_SCORES_DEVICE = 2**20, 2**26
"""Number of scores computed at a time; on a CPU small enough to stay in its caches."""


def softcapped_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    cap: float,
    mask: torch.Tensor | None = None,
    dropout: float = 0.0,
    drop: Drop | None = None,
    scale: float | None = None,
) -> torch.Tensor:
    """Return ``softmax(cap tanh(q k^T * scale / cap)) v``, with the mask applied after the cap.

    Shapes:
        query  [b, a/t, s, d]
        key, value [b, g/t, s_k, d], each head shared by a/g neighbouring query heads
        mask   bool [b or 1, 1, s, s_k], True where a query may attend, or values that are added to the capped scores,
               [b or 1, a/t or 1, s, s_k], which get no gradient; None: causal
        output [b, a/t, s, d]

    Args:
        drop: dropout of probabilities, used instead of ``dropout``; with either, all probabilities are in memory.
        scale: default ``d ** -0.5``.

    Source: Gemma Team 2024, "Gemma 2: improving open language models at a practical size", section 2.
    """
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    if dropout or drop is not None:
        key, value = (repeat_kv(tensor, query.shape[1]) for tensor in (key, value))
        mask = causal_mask(query, key) if mask is None else mask
        bias = additive_mask(mask, query.dtype) if mask.dtype == torch.bool else mask
        return attention_with_dropout(
            query, key, value, bias, drop=drop or partial(F.dropout, p=dropout), scale=scale, cap=cap
        )
    context: torch.Tensor = _forward(query, key, value, mask, cap, scale)
    return context


class _HeadSlice(NamedTuple):
    """Key groups in one sample that are processed together, with query heads."""

    sample: int
    groups: slice
    heads: slice


def _head_slices(query: torch.Tensor, key: torch.Tensor) -> Iterator[_HeadSlice]:
    """Yield slices that cover all heads of all samples."""
    (b, a, s, _), (_, g, s_k, _) = query.shape, key.shape
    heads_per_group = a // g
    max_groups = max(
        1, (MAX_SCORES_CPU if query.device.type == "cpu" else MAX_SCORES_DEVICE) // max(heads_per_group * s * s_k, 1)
    )
    for sample in range(b):
        for first in range(0, g, max_groups):
            stop = min(first + max_groups, g)
            yield _HeadSlice(sample, slice(first, stop), slice(first * heads_per_group, stop * heads_per_group))


def _by_group(x: torch.Tensor, head_slice: _HeadSlice, num_groups: int) -> torch.Tensor:
    """Concatenate the queries in a slice's n heads by group: [groups, n/groups s, d]."""
    return x[head_slice.sample, head_slice.heads].reshape(num_groups, -1, x.shape[-1])


def _probabilities(
    query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor | None, head_slice: _HeadSlice, cap: float, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the probabilities of a slice, and the values of tanh in the capped scores.

    Shapes:
        query  [groups, n/groups s, d], key [groups, s_k, d]
        output 2 x [groups, n/groups s, s_k], in fp32 for 16-bit inputs
    """
    size = query.shape[1] // ((head_slice.heads.stop - head_slice.heads.start) // len(query))
    tangents = torch.bmm(query, key.transpose(1, 2))
    tangents = tangents.to(torch.promote_types(query.dtype, torch.float32)).mul_(scale / cap).tanh_()
    scores = (tangents * cap).view(-1, size, key.shape[1])  # [n, s, s_k]
    if mask is None:
        future = torch.ones(scores.shape[1:], dtype=torch.bool, device=scores.device).triu_(1)
        scores.masked_fill_(future, mask_value(scores.dtype))
    else:
        slice_mask = mask[head_slice.sample if len(mask) > 1 else 0]  # [a or 1, s, s_k]
        slice_mask = slice_mask[head_slice.heads] if len(slice_mask) > 1 else slice_mask
        if slice_mask.dtype == torch.bool:
            scores.masked_fill_(~slice_mask, mask_value(scores.dtype))
        else:
            scores.add_(slice_mask)
    return torch.softmax(scores, dim=-1).view_as(tangents), tangents


@torch.library.custom_op("megatron_tds::softcapped_attention", mutates_args=())
def _forward(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, cap: float, scale: float
) -> torch.Tensor:
    context = torch.empty_like(query, memory_format=torch.contiguous_format)
    for head_slice in _head_slices(query, key):
        k, v = (
            key[head_slice.sample, head_slice.groups],
            value[head_slice.sample, head_slice.groups],
        )  # 2 x [groups, s_k, d]
        probabilities, _ = _probabilities(_by_group(query, head_slice, len(k)), k, mask, head_slice, cap, scale)
        context[head_slice.sample, head_slice.heads] = torch.bmm(probabilities.to(v.dtype), v).view(
            -1, *query.shape[2:]
        )
    return context


@torch.library.custom_op("megatron_tds::softcapped_attention_backward", mutates_args=())
def _backward(
    gradient: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    cap: float,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    grads = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in (query, key, value)]
    for head_slice in _head_slices(query, key):
        k, v = key[head_slice.sample, head_slice.groups], value[head_slice.sample, head_slice.groups]
        q, grad = (_by_group(x, head_slice, len(k)) for x in (query, gradient))
        probabilities, tangents = _probabilities(q, k, mask, head_slice, cap, scale)
        grads[2][head_slice.sample, head_slice.groups] = torch.bmm(probabilities.to(v.dtype).transpose(1, 2), grad)
        # first the gradient of the probabilities, then of the scores
        score_grads = torch.bmm(grad, v.transpose(1, 2)).to(probabilities.dtype)
        score_grads = torch.ops.aten._softmax_backward_data(score_grads, probabilities, -1, probabilities.dtype)
        product_grads = score_grads.mul_(1.0 - tangents.square_()).mul_(scale).to(q.dtype)
        grads[0][head_slice.sample, head_slice.heads] = torch.bmm(product_grads, k).view(-1, *query.shape[2:])
        grads[1][head_slice.sample, head_slice.groups] = torch.bmm(product_grads.transpose(1, 2), q)
    query_grad, key_grad, value_grad = grads
    return query_grad, key_grad, value_grad


@_forward.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, cap: float, scale: float) -> Tensor:
    return torch.empty_like(query, memory_format=torch.contiguous_format)


@_backward.register_fake
def _(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, cap: float, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    first, second, third = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (query, key, value))
    return first, second, third


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    *tensors, ctx.cap, ctx.scale = inputs
    ctx.save_for_backward(*tensors)


def _gradient(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    return (*_backward(grad, *ctx.saved_tensors, ctx.cap, ctx.scale), None, None, None)


_forward.register_autograd(_gradient, setup_context=_save_for_backward)


def _product_flops(query: torch.Size, key: torch.Size) -> int:
    b, a, s, d = query
    return 2 * b * a * s * key[2] * d


@register_flop_formula(torch.ops.megatron_tds.softcapped_attention)
def _flops(query: torch.Size, key: torch.Size, *_: Any, **__: Any) -> int:
    return 2 * _product_flops(query, key)


@register_flop_formula(torch.ops.megatron_tds.softcapped_attention_backward)
def _flops_of_backward(_: torch.Size, query: torch.Size, key: torch.Size, *__: Any, **___: Any) -> int:
    return 5 * _product_flops(query, key)
