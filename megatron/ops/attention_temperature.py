"""Attention temperature: queries at late positions are multiplied by a factor that grows with the position."""

from __future__ import annotations

import torch


def scale_queries(query: torch.Tensor, positions: torch.Tensor | None, scale: float, floor: int) -> torch.Tensor:
    """Multiply queries by ``1 + scale * ln(1 + position // floor)``.

    The factor is computed in fp32, or in the dtype of ``query`` if it is wider.

    Shapes:
        query, output [b, a/t, s, d]
        positions     [b or 1, s]; None: 0 ... s-1

    Args:
        floor: number of consecutive positions with the same factor.

    Source: Meta 2025, Llama 4's code; Mistral AI 2025, Ministral 3's code.
    """
    if positions is None:
        positions = torch.arange(query.shape[2], device=query.device).unsqueeze(0)
    dtype = torch.promote_types(query.dtype, torch.float32)
    steps = torch.div(positions, floor, rounding_mode="floor").to(dtype)
    factor = 1.0 + scale * torch.log1p(steps)  # [b or 1, s]
    return (query * factor[:, None, :, None]).to(query.dtype)
