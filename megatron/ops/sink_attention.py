"""Attention with sinks: the softmax of each head has one more score, whose key has no value."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F

from megatron.ops.attention import Drop, additive_mask, attention_with_dropout, lower_right_causal_mask, repeat_kv
from megatron.ops.document_attention import document_attention, select_implementation

# Probabilities p_j = exp(x_j) / (exp(sink) + sum of exp(x_k)). With the log-sum-exp l of the scores they are those of
# the usual softmax times sigmoid(l - sink). A sink takes probability away from the keys, so that a head may attend to
# nothing. Each query applies its sink once to all of its keys: with context parallelism the keys of all ranks are
# gathered first, so no part of the softmax is computed without the others.
#
# | case | implementation |
# |---|---|
# | causal, documents, windows; on a CPU | tiles of ``megatron.ops.document_attention`` |
# | the same, on CUDA with Triton | ``flex_attention``, with sigmoid(l - sink) applied to its output |
# | dropout, masks (generation with a cache, ALiBi), other devices and dtypes | operators; all scores are in memory |
#
# Source: Xiao et al. 2023, "Efficient streaming language models with attention sinks"; Miller 2023, "Attention is off
# by one" (sinks of 0); OpenAI 2025, "gpt-oss-120b & gpt-oss-20b model card", section 2.3 (trained sinks).


def sink_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, sinks: torch.Tensor,
    mask: torch.Tensor | None = None, dropout: float = 0.0, drop: Drop | None = None, scale: float | None = None,
    cap: float = 0.0,
) -> torch.Tensor:  # fmt: skip
    """Compute ``softmax([q k^T * scale, sink]) [v, 0]``.

    Shapes:
        query  [b, a/t, s, d]
        key, value [b, g/t, s_k, d], each head shared by a/g neighbouring query heads; s_k is at least s
        sinks  [a/t], the score of each head's sink; it is neither scaled nor capped
        mask   bool [b or 1, 1, s, s_k], True where a query may attend, or values that are added to the scores,
               [b or 1, a/t or 1, s, s_k]; None: causal attention of the last s positions of the keys
        output [b, a/t, s, d]

    Args:
        drop: dropout of probabilities, used instead of ``dropout``.
        scale: default ``d ** -0.5``.
        cap: cap of ``softcap``; 0: none.
    """
    num_keys, first = key.shape[2], key.shape[2] - query.shape[2]
    has_dropout = dropout > 0.0 or drop is not None
    if mask is None and not has_dropout and _has_implementation(query, num_keys):
        starts = torch.zeros(query.shape[0], query.shape[2], dtype=torch.int32, device=query.device)
        return document_attention(query, key, value, starts, first=first, scale=scale, cap=cap, sinks=sinks)
    mask = lower_right_causal_mask(query, key) if mask is None else mask
    key, value = (repeat_kv(tensor, query.shape[1]) for tensor in (key, value))
    bias = additive_mask(mask, query.dtype) if mask.dtype == torch.bool else mask
    drop = drop or (partial(F.dropout, p=dropout) if has_dropout else _keep_all)
    return attention_with_dropout(query, key, value, bias, drop=drop, scale=scale, cap=cap, sinks=sinks)


def _has_implementation(query: torch.Tensor, num_keys: int) -> bool:
    return select_implementation(query, num_keys, query.shape[-1], is_plain=False) is not None


def _keep_all(probabilities: torch.Tensor) -> torch.Tensor:
    return probabilities
