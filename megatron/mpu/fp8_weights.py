"""Quantized weights that the micro-batches of a training step share.

The weights do not change between the micro-batches of a step. Within ``sharing_quantized_weights``, the first product
with a weight saves the quantized values, and later products reuse them instead of quantizing the weight again. ``free``
drops the values before the update. Outside of such a block, every product quantizes its weight.

The key of an entry is the address, shape and strides of the weight, because recompute passes detached tensors that
share the weight's memory. The entry holds a reference to this memory, so that no other tensor can get the same address.
Weights that are gathered for a layer and freed afterwards (ZeRO 3) must not be shared: the block would retain the
unsharded weights of all layers.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from tds.torch_api import base_of

Key = tuple[int, torch.Size, tuple[int, ...], str]

_saved: dict[Key, tuple[torch.Tensor, Any]] | None = None  # global, because recompute runs layers in autograd's threads


@contextmanager
def sharing_quantized_weights(is_enabled: bool = True) -> Iterator[None]:
    """Share quantized weights within the block. Call ``free`` before the weights change.

    Args:
        is_enabled: False: every product quantizes its weight.
    """
    global _saved
    outer, _saved = _saved, {} if is_enabled else None
    try:
        yield
    finally:
        _saved = outer


def free() -> None:
    """Drop all saved values, because the weights are about to change."""
    if _saved is not None:
        _saved.clear()


def find(weight: torch.Tensor, form: str) -> Any:
    """Return the saved values of ``weight`` in ``form``; None if there are none."""
    if not _saved:
        return None
    entry = _saved.get(_key(weight, form))
    return None if entry is None else entry[1]


def save(weight: torch.Tensor, form: str, values: Any) -> None:
    """Save ``values``, unless ``weight`` is a temporary copy of several experts (``stacked``)."""
    is_temporary = weight.dim() > 2 and base_of(weight) is None
    if _saved is not None and not is_temporary:
        _saved[_key(weight, form)] = weight.detach(), values


def num_bytes() -> int:
    """Return the bytes of all saved values."""
    return sum(values.nbytes for _, values in (_saved or {}).values())


def _key(weight: torch.Tensor, form: str) -> Key:
    return weight.data_ptr(), weight.shape, weight.stride(), form
