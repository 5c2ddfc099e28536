"""Ordered: data sets that know the order of their samples and their corpora.

A data set of a user's own may have attributes of the same names that mean something else, so all that asks goes
through here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from megatron.data.blend_schedule import BlendSchedule
from megatron.data.blended_dataset import MegatronDataset


class Ordered(Protocol):
    """``BlendedDataset``, or a data set of a user's own that passes on what one has."""

    @property
    def order(self) -> BlendSchedule: ...

    @property
    def parts(self) -> Mapping[str, MegatronDataset]: ...

    def use_order(self, order: BlendSchedule) -> None: ...


def as_ordered(dataset: object) -> Ordered | None:
    """Return ``dataset`` if it has an order, the corpora of that order, and can take another; else None."""
    order, parts = getattr(dataset, "order", None), getattr(dataset, "parts", None)
    if not isinstance(order, BlendSchedule) or not isinstance(parts, Mapping):
        return None
    if list(parts) != [corpus.name for corpus in order.corpora] or not callable(getattr(dataset, "use_order", None)):
        return None
    return dataset  # type: ignore[return-value]
