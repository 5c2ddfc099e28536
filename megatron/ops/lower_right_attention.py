"""Causal attention of the last queries of a sequence to all of its keys, without a mask."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.nn.attention.bias import causal_lower_right

QUERIES = {"cpu": 128}
"""Of a block, whose scores alone are in memory; elsewhere ``MOST``."""
MOST = 512
HALF = (torch.float16, torch.bfloat16)


def lower_right_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float | None = None
) -> torch.Tensor:
    """Return ``softmax(q k^T * scale) v`` where the last query sees all keys, the one before all but the last, ...

    Shapes:
        query  [b, a/t, s, d]
        key, value [b, g/t, s_k, d], each for a/g neighbouring queries; s_k is at least s
        output [b, a/t, s, d]

    Args:
        scale: default ``d ** -0.5``.

    Source: Dao et al. 2022, "FlashAttention": probabilities are made again in backward.
    """
    if query.shape[2] == key.shape[2] and query.shape[1] == key.shape[1]:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale)
    if query.device.type == "cuda" and query.dtype in HALF:
        bias: Any = causal_lower_right(query.shape[2], key.shape[2])
        is_grouped = query.shape[1] != key.shape[1]
        return F.scaled_dot_product_attention(query, key, value, bias, scale=scale, enable_gqa=is_grouped)
    context: torch.Tensor = _LowerRight.apply(query, key, value, query.shape[-1] ** -0.5 if scale is None else scale)
    return context


class _Block(NamedTuple):
    """Queries ``own`` of a rank, and the number of keys that the last of them sees."""

    own: slice
    seen: int


def _blocks(query: torch.Tensor, key: torch.Tensor) -> Iterator[_Block]:
    size, before = query.shape[2], key.shape[2] - query.shape[2]
    most = QUERIES.get(query.device.type, MOST)
    for first in range(0, size, most):
        last = min(first + most, size)
        yield _Block(slice(first, last), before + last)


def _by_group(x: torch.Tensor, groups: int) -> torch.Tensor:
    """Return [b, g, (a/g) s, d] of x [b, a, s, d], a group's heads one behind the other; 16 bits in fp32."""
    return _wide(x.unflatten(1, (groups, -1)).flatten(2, 3))


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x.float() if x.dtype in HALF else x


def _probabilities(query: torch.Tensor, keys: torch.Tensor, count: int, scale: float) -> torch.Tensor:
    """Return [b, g, (a/g) q, seen] of queries [b, g, (a/g) q, d], of which ``count`` = q belong to a head."""
    scores = query * scale @ _wide(keys).transpose(2, 3)
    by_head = scores.unflatten(2, (-1, count))  # [b, g, a/g, q, seen]
    future = torch.ones(count, count, dtype=torch.bool, device=query.device).triu_(1)
    by_head[..., -count:].masked_fill_(future, float("-inf"))
    return torch.softmax(scores, dim=-1)


class _LowerRight(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
        ctx.save_for_backward(query, key, value)
        ctx.scale = scale
        context, groups = torch.empty_like(query), key.shape[1]
        for own, seen in _blocks(query, key):
            queries = _by_group(query[:, :, own], groups)
            probabilities = _probabilities(queries, key[:, :, :seen], own.stop - own.start, scale)
            context[:, :, own] = (probabilities @ _wide(value[:, :, :seen])).view(context[:, :, own].shape)
        return context

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        query, key, value = ctx.saved_tensors
        of_query, groups = torch.empty_like(query), key.shape[1]
        of_key, of_value = (_wide(torch.zeros_like(part)) for part in (key, value))
        for own, seen in _blocks(query, key):
            queries, given = (_by_group(each[:, :, own], groups) for each in (query, grads[0]))
            keys, values = _wide(key[:, :, :seen]), _wide(value[:, :, :seen])
            probabilities = _probabilities(queries, keys, own.stop - own.start, ctx.scale)
            of_value[:, :, :seen] += probabilities.transpose(2, 3) @ given
            of_scores = given @ values.transpose(2, 3)  # of the probabilities, then of the scores
            of_scores -= (of_scores * probabilities).sum(-1, keepdim=True)
            of_scores *= probabilities * ctx.scale
            of_key[:, :, :seen] += of_scores.transpose(2, 3) @ queries
            of_query[:, :, own] = (of_scores @ keys).view(of_query[:, :, own].shape)
        return of_query, of_key.to(key.dtype), of_value.to(value.dtype), None
