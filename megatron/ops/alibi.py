"""ALiBi: scores fall with the distance between query and key, by a slope of each head's own. Nothing is learned."""

from __future__ import annotations

import torch

from megatron.ops.attention import document_mask, lowest


def alibi_slopes(num_heads: int, bias_max: float = 8.0) -> list[float]:
    """Return the slope of each head: ``2 ** (-bias_max k / n)`` for k = 1 ... n, with n heads.

    Where ``num_heads`` is no power of two, n is the next one; the heads get every second slope, from the second on,
    and then the others from the first on, until all have one. The slopes of half as many heads come first, therefore.

    Source: Press et al. 2022, "Train short, test long", section 3 and code; MosaicML's MPT has ``bias_max``.
    """
    n = 1 << (num_heads - 1).bit_length()
    slopes = [2.0 ** (-bias_max * k / n) for k in range(1, n + 1)]
    return slopes if n == num_heads else [*slopes[1::2], *slopes[::2]][:num_heads]


def alibi_bias(
    slopes: torch.Tensor, query_positions: torch.Tensor, key_positions: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """Return what is added to the scores: minus slope times distance, and the lowest number where a key comes later.

    Made in fp32 (fp64 for fp64), then rounded to ``dtype``. In bf16 that is exact up to a distance of 256 where slopes
    are powers of two; else a bias B is off by up to ``2 ** -8`` B, where ``e ** -B`` is the share that it leaves.

    Shapes:
        slopes [a]
        query_positions [b or 1, s], key_positions [s_k] integers
        output [b or 1, a, s, s_k]
    """
    wide = dtype if dtype == torch.float64 else torch.float32
    ahead = (key_positions - query_positions.unsqueeze(-1)).unsqueeze(1)  # [b, 1, s, s_k]
    bias = slopes.to(wide).view(-1, 1, 1) * ahead.to(wide)  # [b, a, s, s_k]
    return bias.to(dtype).masked_fill_(ahead > 0, lowest(dtype))


def within_documents(bias: torch.Tensor, segment_ids: torch.Tensor) -> torch.Tensor:
    """Return ``bias`` with the lowest number where query and key are of two documents.

    Distances are differences of positions, so within a document they are the same wherever it begins.

    Shapes:
        bias   [1, a, s, s]
        segment_ids [b, s] integers, the document of each position
        output [b, a, s, s]
    """
    return bias.masked_fill(~document_mask(segment_ids), lowest(bias.dtype))
