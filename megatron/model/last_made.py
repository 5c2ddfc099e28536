"""What all layers of a stage share of a micro-batch, made once of a tensor that each of them is given."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial

import torch


class LastMade:
    """What was made of a tensor last, as long as it is the same tensor and nobody has written to it."""

    def __init__(self) -> None:
        self._key: tuple[weakref.ref[torch.Tensor], int] | None = None
        self._made: torch.Tensor | None = None

    def of(self, key: torch.Tensor, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Return what ``make`` returned for ``key`` last, or returns now."""
        is_known = self._key is not None and self._key[0]() is key and self._key[1] == key._version
        if self._made is None or not is_known:
            self._made, self._key = make(), (weakref.ref(key), key._version)
        return self._made

    def forget(self) -> None:
        """Make it anew the next time."""
        self._key = self._made = None


class SharedMask:
    """The mask of the documents of a micro-batch, for the layers of a stage: it is in memory once for their backward.

    Args:
        make: of segment ids [b, s], the mask [b, 1, s, s].
    """

    def __init__(self, make: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._make, self._last = make, LastMade()

    @torch.compiler.disable  # what is kept from one call to the next is no part of a graph
    def of(self, segment_ids: torch.Tensor) -> torch.Tensor:
        """Return the mask of ``segment_ids``."""
        return self._last.of(segment_ids, partial(self._make, segment_ids))
