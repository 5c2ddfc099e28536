"""Collectives between a tensor and its parts, by the name that this torch has for them.

torch 2.13 calls them ``all_gather_single`` and ``reduce_scatter_single`` and warns of the older names, the only ones of
torch before.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


def all_gather_single(whole: torch.Tensor, part: torch.Tensor, **options: Any) -> Any:
    """Fill ``whole`` with the ``part`` of each rank, one after another; options and result are torch's. Collective."""
    return _of_torch("all_gather_single", "all_gather_into_tensor")(whole, part, **options)


def reduce_scatter_single(part: torch.Tensor, whole: torch.Tensor, **options: Any) -> Any:
    """Fill ``part`` with this rank's part of the sum of every rank's ``whole``; the rest is torch's. Collective."""
    return _of_torch("reduce_scatter_single", "reduce_scatter_tensor")(part, whole, **options)


def _of_torch(name: str, older: str) -> Any:
    return getattr(dist, name, None) or getattr(dist, older)
