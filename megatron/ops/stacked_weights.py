"""Weights of one shape in one storage, so that a grouped product reads them as one tensor without a copy."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatron import device
from tds.torch_api import shares_memory

ALIGNMENT_BYTES = 16
"""Matrices of a grouped product must start at multiples of 16 bytes on CUDA."""


def stacked(weights: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return ``weights`` as one tensor [E, ...]: a view if they are equally spaced, otherwise a copy."""
    first, distance = weights[0].detach(), distance_of(weights)
    if distance is None:
        return torch.stack(tuple(weights))
    return first.as_strided((len(weights), *first.shape), (distance, *first.stride()))


def distance_of(weights: Sequence[torch.Tensor]) -> int | None:
    """Return the constant distance between the starts of ``weights`` in one storage, in elements.

    None if there is none: the weights are in several storages, at irregular or overlapping positions, not contiguous,
    not aligned to ``ALIGNMENT_BYTES``, or of several shapes or dtypes.
    """
    first = weights[0]
    start = int(first.storage_offset())
    distance = int(weights[1].storage_offset()) - start if len(weights) > 1 else first.numel()
    alignment = ALIGNMENT_BYTES // first.element_size()
    if distance < first.numel() or start % alignment or distance % alignment:
        return None
    for idx, weight in enumerate(weights):
        is_regular = weight.storage_offset() == start + idx * distance and weight.is_contiguous()
        if not is_regular or weight.shape != first.shape or weight.dtype != first.dtype:
            return None
        if not shares_memory(first, weight):
            return None
    return distance


@torch.no_grad()
def share_storage(weights: Sequence[torch.nn.Parameter]) -> None:
    """Move ``weights`` with one shape, dtype and device into one storage; keep the parameter objects."""
    values = torch.stack(tuple(weights))
    for weight, new_data in zip(weights, values.unbind(), strict=True):
        device.replace_data(weight, new_data)
