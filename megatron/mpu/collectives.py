"""Collectives between a tensor and its parts, by the name that this torch has for them.

torch 2.13 calls them ``all_gather_single`` and ``reduce_scatter_single`` and warns of the older names, the only ones of
torch before. It is all that torch 2.11 lacks of what this project uses.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

OLDER = {"all_gather_single": "all_gather_into_tensor", "reduce_scatter_single": "reduce_scatter_tensor"}
"""Name of torch 2.13 -> name before."""


def all_gather_single(whole: torch.Tensor, part: torch.Tensor, **options: Any) -> Any:
    """Fill ``whole`` with the ``part`` of each rank, one after another; options and result are torch's. Collective."""
    return getattr(dist, name_of("all_gather_single"))(whole, part, **options)


def reduce_scatter_single(part: torch.Tensor, whole: torch.Tensor, **options: Any) -> Any:
    """Fill ``part`` with this rank's part of the sum of every rank's ``whole``; the rest is torch's. Collective."""
    return getattr(dist, name_of("reduce_scatter_single"))(part, whole, **options)


def name_of(name: str) -> str:
    """Return what this torch calls the collective that torch 2.13 calls ``name``."""
    return name if hasattr(dist, name) else OLDER[name]
