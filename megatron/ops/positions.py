"""Positions of tokens: within their documents, and relative to each other."""

from __future__ import annotations

import math

import torch


def positions_in_segments(segment_ids: torch.Tensor) -> torch.Tensor:
    """Return the position of each token within its document.

    Shapes:
        segment_ids [b, s] integers, equal and adjacent within a document
        output      int64 [b, s], from 0 in each
    """
    positions = torch.arange(segment_ids.shape[1], device=segment_ids.device).expand(segment_ids.shape)
    starts = torch.ones_like(segment_ids, dtype=torch.bool)
    starts[:, 1:] = segment_ids[:, 1:] != segment_ids[:, :-1]
    return positions - positions.masked_fill(~starts, 0).cummax(dim=1).values


def relative_buckets(
    distances: torch.Tensor, *, num_buckets: int, max_distance: int, is_bidirectional: bool
) -> torch.Tensor:
    """Return the bucket of each distance, key position minus query position.

    Half of the buckets of a direction hold one distance each, from 0; the others grow by a constant factor up to
    ``max_distance``, and the last holds all beyond. With both directions each has half of ``num_buckets``, keys to the
    right the second half; with one, keys to the right are in bucket 0. The logarithm is in fp32, as Hugging Face's,
    so that both round alike at the edge of a bucket.

    Shapes:
        distances int64, any shape; output the same

    Source: Raffel et al. 2020, "Exploring the limits of transfer learning", section 2.1.
    """
    size = num_buckets // 2 if is_bidirectional else num_buckets
    away = distances.abs() if is_bidirectional else (-distances).clamp(min=0)
    exact = size // 2
    growth = torch.log(away.clamp(min=1).float() / exact) / math.log(max_distance / exact)
    beyond = (exact + (growth * (size - exact)).long()).clamp(max=size - 1)
    buckets = torch.where(away < exact, away, beyond)
    return buckets + size * (distances > 0) if is_bidirectional else buckets
