"""Scaled dot-product attention."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

Drop = Callable[[torch.Tensor], torch.Tensor]
"""Dropout of probabilities [b, a/t, s, s_k]: sets some to 0 and scales up the others."""
MASKED_BACKENDS = [
    SDPBackend.OVERRIDEABLE,  # kernel of a plug-in
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]
"""Kernels allowed with a mask: all except cuDNN's, torch's first choice on H100 from 2.11 on.

cuDNN's kernel returns NaN gradients of queries if there is a mask, s % 128 == 64, and the scores of a query are low,
for example because it may attend to no key.
"""


def attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, mask: torch.Tensor | None = None,
    is_causal: bool | None = None, dropout: float = 0.0, drop: Drop | None = None, scale: float | None = None,
) -> torch.Tensor:  # fmt: skip
    """Return ``softmax(q k^T * scale) v``.

    Shapes:
        query  [b, a/t, s, d]
        key, value [b, a/t, s_k, d], or [b, g/t, s_k, d] with each head shared by a/g neighbouring query heads
        mask   bool [b or 1, 1, s, s_k], True where a query may attend, or values that are added to the scores
        output [b, a/t, s, d]

    Args:
        is_causal: no query sees a later key, without an s x s mask in memory; None: True if there is no mask. If there
            is a mask, it must exclude later keys itself.
        drop: dropout of probabilities, used instead of ``dropout``; all probabilities are in memory then.
        scale: default ``d ** -0.5``.

    Source: Vaswani et al. 2017, "Attention is all you need", section 3.2.1.
    """
    is_causal = mask is None if is_causal is None else is_causal
    is_grouped = key.shape[1] != query.shape[1]
    if drop is not None:
        if is_grouped:
            key, value = (repeat_kv(tensor, query.shape[1]) for tensor in (key, value))
        mask = causal_mask(query, key) if is_causal else mask
        bias = additive_mask(mask, query.dtype) if mask is not None and mask.dtype == torch.bool else mask
        return attention_with_dropout(query, key, value, bias, drop=drop, scale=scale)
    with attention_kernels(mask):
        return F.scaled_dot_product_attention(
            query, key, value, mask, dropout, is_causal, scale=scale, enable_gqa=is_grouped
        )


def lower_right_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float | None = None, dropout: float = 0.0
) -> torch.Tensor:
    """Attend causally from the last s positions of a sequence to all keys.

    On CUDA no mask is materialized.

    Shapes:
        query  [b, a/t, s, d]
        key, value [b, g/t, s_k, d], each head shared by a/g neighbouring query heads; s_k is at least s
        output [b, a/t, s, d]

    Args:
        scale: default ``d ** -0.5``.
        dropout: dropout rate of the probabilities.
    """
    from torch.nn.attention.bias import causal_lower_right  # imported on use: it imports a compiler

    bias: Any = causal_lower_right(query.shape[2], key.shape[2])
    is_grouped = key.shape[1] != query.shape[1]
    return F.scaled_dot_product_attention(
        query, key, value, bias, dropout_p=dropout, scale=scale, enable_gqa=is_grouped
    )


def attention_kernels(mask: torch.Tensor | None) -> AbstractContextManager[None]:
    """Restrict torch's attention kernels to ``MASKED_BACKENDS`` within the block if there is a mask.

    Source: https://github.com/pytorch/pytorch/issues/196678, on the error in cuDNN's kernel.
    """
    return nullcontext() if mask is None else sdpa_kernel(MASKED_BACKENDS)


def repeat_kv(kv: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Repeat keys or values [b, g, s_k, d] for each query head in the group: [b, a, s_k, d]."""
    return kv.unsqueeze(2).expand(-1, -1, num_heads // kv.shape[1], -1, -1).flatten(1, 2)


def attention_with_dropout(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    drop: Drop,
    scale: float | None = None,
    cap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return ``drop(softmax(q k^T * scale + bias)) v``, operator by operator; the softmax of 16-bit scores is in fp32.

    Shapes:
        as in ``attention``; bias [b or 1, a/t or 1, s, s_k]; sinks [a/t]

    Args:
        cap: cap of ``softcap``, applied before ``bias``; 0: none.
        sinks: scores of an additional key without a value, one per head.
    """
    scores = query * (query.shape[-1] ** -0.5 if scale is None else scale) @ key.transpose(2, 3)  # [b, a/t, s, s_k]
    scores = softcap(scores, cap) if cap else scores
    scores = scores if bias is None else scores + bias
    softmax_dtype = scores.dtype if scores.dtype == torch.float64 else torch.float32
    if sinks is None:
        probabilities = torch.softmax(scores, dim=-1, dtype=softmax_dtype)
    else:
        sink_scores = sinks.to(softmax_dtype).view(-1, 1, 1).expand(*scores.shape[:3], 1)
        probabilities = torch.softmax(torch.cat((scores.to(softmax_dtype), sink_scores), dim=-1), dim=-1)[..., :-1]
    return drop(probabilities).to(value.dtype) @ value


def softcap(x: torch.Tensor, cap: float) -> torch.Tensor:
    """Return ``cap * tanh(x / cap)``: values well below the cap hardly change, and none exceeds it.

    Source: Bello et al. 2017, "Neural combinatorial optimization with reinforcement learning"; Gemma 2, 2024.
    """
    return cap * torch.tanh(x / cap)


def causal_mask(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Build a mask in which query i sees keys 0 to i: bool [s, s_k]."""
    return torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device).tril()


def lower_right_causal_mask(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Build a causal mask for the last s positions of a sequence and all keys: bool [s, s_k]."""
    return torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device).tril(
        key.shape[2] - query.shape[2]
    )


def document_mask(segment_ids: torch.Tensor) -> torch.Tensor:
    """Build a causal mask within documents: a query sees positions of the same document up to its own.

    Shapes:
        segment_ids [b, s] integers, document index per position
        output      bool [b, 1, s, s]
    """
    is_same = segment_ids.unsqueeze(2) == segment_ids.unsqueeze(1)  # [b, s, s]
    return is_same.tril().unsqueeze(1)


def segment_mask(query_segments: torch.Tensor, key_segments: torch.Tensor) -> torch.Tensor:
    """Build a bidirectional mask within documents. Padding (-1) sees only padding, and only padding sees it.

    Shapes:
        query_segments [b, s], key_segments [b, s_k] integers, document index per position
        output         bool [b, 1, s, s_k]
    """
    is_same = query_segments.unsqueeze(2) == key_segments.unsqueeze(1)  # [b, s, s_k]
    return is_same.unsqueeze(1)


def positions_in_segments(segment_ids: torch.Tensor) -> torch.Tensor:
    """Return token positions within documents.

    Shapes:
        segment_ids [b, s] integers, equal and adjacent within a document
        output      int64 [b, s], starting from 0 in each document
    """
    positions = torch.arange(segment_ids.shape[1], device=segment_ids.device).expand(segment_ids.shape)
    is_start = torch.ones_like(segment_ids, dtype=torch.bool)
    is_start[:, 1:] = segment_ids[:, 1:] != segment_ids[:, :-1]
    return positions - positions.masked_fill(~is_start, 0).cummax(dim=1).values


def additive_mask(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return 0 where ``mask`` is True and ``mask_value(dtype)`` elsewhere.

    A query that may attend to no key then attends to all keys equally, whereas -inf would yield NaN.
    """
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, mask_value(dtype))


def mask_value(dtype: torch.dtype) -> float:
    """Return the value added to masked scores: half the lowest finite value of ``dtype``.

    The value remains finite when a low score is added, and when multiplied by log2(e) in kernels that compute powers
    of 2. Scores that are not masked must be well above it: in fp16 above -30,000.
    """
    return torch.finfo(dtype).min / 2
