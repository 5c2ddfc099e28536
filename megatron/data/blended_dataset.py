"""BlendedDataset: one split's samples, taken from one or several corpora."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import cached_property
from typing import Any, Protocol

from megatron.data.blend_schedule import BlendSchedule
from megatron.data.megatron_order.order import MegatronOrder
from megatron.errors import DataError, SampleError

SampleOrder = BlendSchedule | MegatronOrder
"""An order of the samples of a run: --data-order native or megatron."""


class MegatronDataset(Protocol):
    """A single-corpus dataset, such as ``GPTDataset``, ``T5Dataset`` or ``SpanFilesDataset``."""

    @property
    def fingerprint(self) -> str: ...

    @property
    def samples_per_epoch(self) -> int: ...

    def __getitem__(self, index: int) -> Any: ...


class BlendedDataset:
    """Endless samples from one or several corpora.

    ``order`` determines sample i's corpus and the index within the corpus. With a single corpus, sample i is the
    corpus's sample i.

    Args:
        exclusion: digest of the excluded documents of all corpora; None without ``--exclude``.

    Attributes:
        parts: corpus name -> dataset, for statistics by corpus.
    """

    def __init__(self, parts: Mapping[str, MegatronDataset], order: SampleOrder, exclusion: str | None = None) -> None:
        self.parts, self.exclusion = dict(parts), exclusion
        self.use_order(order)

    def use_order(self, order: SampleOrder) -> None:
        """Replace the sample order.

        Raises:
            ValueError: the corpora in ``order`` are not this dataset's.
        """
        names = [corpus.name for corpus in order.corpora]
        if names != list(self.parts):
            raise ValueError(f"the order must have the corpora {list(self.parts)}, got {names}")
        self.order, self._named_datasets = order, list(self.parts.items())

    @cached_property
    def fingerprint(self) -> str:
        """Short digest of the corpora and their samples; it does not depend on the weights."""
        fingerprints = [dataset.fingerprint for dataset in self.parts.values()]
        if len(fingerprints) == 1:
            return fingerprints[0]
        return hashlib.sha256(":".join(sorted(fingerprints)).encode()).hexdigest()[:16]

    def __getitem__(self, index: int) -> Any:
        """Read sample ``index``.

        Raises:
            SampleError: the sample cannot be read; the message names its index in the run and in the corpus, and its
                position in the file.
        """
        corpus_idx, sample_idx = self.order.locate(index)
        name, dataset = self._named_datasets[corpus_idx]
        try:
            return dataset[sample_idx]
        except DataError as error:
            if len(self.parts) == 1 and sample_idx == index:
                raise
            raise SampleError(f"sample {index} of the run is sample {sample_idx} of corpus {name}: {error}") from error
