"""Scaled dot-product attention."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    mask: torch.Tensor | None = None,
    dropout: float = 0.0,
    scale: float | None = None,
) -> torch.Tensor:
    """Return ``softmax(q k^T * scale) v``; causal, with no s x s mask in memory, unless ``mask`` is given.

    Shapes:
        query, key, value [b, a/t, s, d]
        mask   bool [b or 1, 1, s, s], True where a query may look; it must include the causal rule itself
        output [b, a/t, s, d]

    Args:
        scale: default ``d ** -0.5``.

    Source: Vaswani et al. 2017, "Attention is all you need", section 3.2.1.
    """
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, dropout_p=dropout, is_causal=mask is None, scale=scale
    )


def document_mask(segment_ids: torch.Tensor) -> torch.Tensor:
    """Return the causal mask within documents: a query sees earlier positions of its own document only.

    Shapes:
        segment_ids [b, s] integers, the document of each position
        output      bool [b, 1, s, s]
    """
    same = segment_ids.unsqueeze(2) == segment_ids.unsqueeze(1)  # [b, s, s]
    return same.tril().unsqueeze(1)
