"""get_plan: a cache for data that all layers of a stage derive from a micro-batch's document starts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

Plan = TypeVar("Plan")

_plans: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""Tensor of starts -> its plans, keyed by function, version of the tensor, slice and settings.

An entry is dropped when its tensor is freed.
"""


def get_plan(make: Callable[..., Plan], starts: Tensor, stops: Tensor | None, *settings: int) -> Plan:
    """Return ``make(starts, stops, *settings)``, cached from an earlier layer if the arguments are the same.

    Shapes:
        starts, stops int32 [b, s]; with stops, plans are cached only if both are slices of one tensor
    """
    base = _base_tensor(starts)
    is_cacheable = stops is None or _base_tensor(stops) is base
    if torch.compiler.is_compiling() or not is_cacheable:  # a cache across calls cannot be part of a graph
        return make(starts, stops, *settings)
    plans: dict[Any, Plan] = _plans.setdefault(base, {})
    key = (make, starts._version, _view_key(starts), None if stops is None else _view_key(stops), *settings)
    if key not in plans:
        plans[key] = make(starts, stops, *settings)
    return plans[key]


def _base_tensor(x: Tensor) -> Tensor:
    """Return the tensor that ``x`` is a view of. Each layer creates a separate view of a slice."""
    return x if x._base is None else x._base


def _view_key(x: Tensor) -> tuple[Any, ...]:
    """Return a key that identifies ``x`` among views of one tensor."""
    return x.storage_offset(), x.shape, x.stride()
