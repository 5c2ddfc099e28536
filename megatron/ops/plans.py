"""What all layers of a stage share of a micro-batch, made once of where its documents begin."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

Plan = TypeVar("Plan")

_plans: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""Starts -> plans by what made them, the version, the piece and the rest of what they were made of; gone with them."""


def plan_of(make: Callable[..., Plan], starts: Tensor, stops: Tensor | None, *settings: int) -> Plan:
    """Return ``make(starts, stops, *settings)``, that of the layer before where all is the same.

    Shapes:
        starts, stops int32 [b, s]; stops are kept track of where both are pieces of one tensor
    """
    whole = _whole(starts)
    is_known = stops is None or _whole(stops) is whole
    if torch.compiler.is_compiling() or not is_known:  # what is kept from call to call is no part of a graph
        return make(starts, stops, *settings)
    known: dict[Any, Plan] = _plans.setdefault(whole, {})
    key = (make, starts._version, _piece(starts), None if stops is None else _piece(stops), *settings)
    if key not in known:
        known[key] = make(starts, stops, *settings)
    return known[key]


def _whole(x: Tensor) -> Tensor:
    """Return what ``x`` is a view of: each layer makes its own view of a piece."""
    return x if x._base is None else x._base


def _piece(x: Tensor) -> tuple[Any, ...]:
    return x.storage_offset(), x.shape, x.stride()
