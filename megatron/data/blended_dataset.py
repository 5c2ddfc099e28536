"""BlendedDataset: the samples of one split from one or several corpora.

blend.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import cached_property
from typing import Any, Protocol

from megatron.data.blend_schedule import BlendSchedule
from megatron.errors import DataError, SampleError


class MegatronDataset(Protocol):
    """The samples of one corpus: ``GPTDataset``, ``T5Dataset``, ``SpanFilesDataset``."""

    @property
    def fingerprint(self) -> str: ...

    @property
    def samples_per_epoch(self) -> int: ...

    def __getitem__(self, index: int) -> Any: ...


class BlendedDataset:
    """Sample i, for any i >= 0, is the one that ``order`` says; with one corpus that corpus's sample i.

    ``parts`` are the samples of each corpus by its name, for what is to be told of each apart.
    """

    def __init__(self, parts: Mapping[str, MegatronDataset], order: BlendSchedule) -> None:
        self.parts = dict(parts)
        self.use_order(order)

    def use_order(self, order: BlendSchedule) -> None:
        """Read in this order from now on; it must be one of these corpora.

        Raises:
            ValueError: it is one of others.
        """
        names = [corpus.name for corpus in order.corpora]
        if names != list(self.parts):
            raise ValueError(f"an order of {list(self.parts)} is needed, got one of {names}")
        self.order, self._by_number = order, list(self.parts.items())

    @cached_property
    def fingerprint(self) -> str:
        """A short text that changes when the samples of a corpus do, or one comes or goes; weights do not matter."""
        prints = [part.fingerprint for part in self.parts.values()]
        if len(prints) == 1:
            return prints[0]
        return hashlib.sha256(":".join(sorted(prints)).encode()).hexdigest()[:16]

    def __getitem__(self, index: int) -> Any:
        """Return sample ``index``.

        Raises:
            SampleError: it cannot be read; names its place in the run, in the corpus and in the file.
        """
        number, place = self.order.locate(index)
        name, part = self._by_number[number]
        try:
            return part[place]
        except DataError as error:
            if len(self.parts) == 1 and place == index:
                raise
            raise SampleError(f"sample {index} of the run is sample {place} of corpus {name}: {error}") from error
