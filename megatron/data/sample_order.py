"""Ordered: datasets that expose their sample order and their corpora.

A user-defined dataset may have unrelated attributes with the same names. Callers therefore use ``as_ordered`` instead
of accessing the attributes directly.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from megatron.data.blended_dataset import MegatronDataset, SampleOrder


class Ordered(Protocol):
    """``BlendedDataset``, or a user-defined dataset that forwards its attributes."""

    @property
    def order(self) -> SampleOrder: ...

    @property
    def parts(self) -> Mapping[str, MegatronDataset]: ...

    def use_order(self, order: SampleOrder) -> None: ...


def as_ordered(dataset: object) -> Ordered | None:
    """Return ``dataset`` if it has a ``SampleOrder``, the order's corpora and ``use_order``; else None."""
    order, parts = getattr(dataset, "order", None), getattr(dataset, "parts", None)
    if not isinstance(order, SampleOrder) or not isinstance(parts, Mapping):
        return None
    if list(parts) != [corpus.name for corpus in order.corpora] or not callable(getattr(dataset, "use_order", None)):
        return None
    return dataset  # type: ignore[return-value]
