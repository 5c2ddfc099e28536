"""GrowingTokens: documents of a text corpus that can be read while the corpus is being encoded.

Units of the encoding job are available in order as soon as they are finished. When the job joins them, the token files
replace the units. The documents and their indices do not change.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from megatron.data.cache import IndexCache
from megatron.data.concatenated_documents import IndexRange
from megatron.data.file_io import READERS, Reader
from megatron.data.indexed_dataset import IndexedDataset
from megatron.data.preprocess import plan as job_plan
from megatron.data.preprocess.shards import Shard, ShardFolder
from megatron.data.split import hash_limits, hashes_of_tokens, is_in_split
from megatron.data.text_corpus import TextCorpus
from megatron.errors import DataError

_UNIT_OF_FILE = 1 << 20
"""Documents per unit of finished token files."""


class Unit:
    """Consecutive documents that are encoded.

    Args:
        first_document: index of the first document in the corpus.
        lengths: int32, tokens per document.
        read_tokens: (first token, count) -> tokens of the unit.
    """

    def __init__(self, first_document: int, lengths: np.ndarray, read_tokens: Callable[[int, int], np.ndarray]) -> None:
        self.first_document, self.lengths, self.read_tokens = first_document, lengths, read_tokens

    @cached_property
    def starts(self) -> np.ndarray:
        """int64[documents + 1], the token at which each document begins, and the number of tokens."""
        return np.concatenate([np.zeros(1, np.int64), np.cumsum(self.lengths, dtype=np.int64)])


@dataclass(frozen=True)
class StreamedSplit:
    """A split of documents whose number is unknown.

    Args:
        split: weights of --split-by hash; None: all documents.
        split_idx: 0 training, 1 validation, 2 test.
    """

    split: str | None = None
    split_idx: int = 0

    @property
    def key(self) -> str:
        """Unique key. It is part of fingerprints in checkpoints, so its format must never change."""
        return "all documents" if self.split is None else f"hash {self.split} {self.split_idx}"

    def select(self, unit: Unit) -> np.ndarray | IndexRange:
        """Select the unit's documents: ascending indices within the unit."""
        if self.split is None:
            return IndexRange(0, len(unit.lengths))
        hashes = hashes_of_tokens(unit.starts, unit.read_tokens)
        return np.flatnonzero(is_in_split(hashes, hash_limits(self.split), self.split_idx)).astype(np.int32)


class GrowingTokens:
    """Tokenized documents of a text corpus, a ``TokenSource`` whose number of documents is unknown.

    Attributes:
        units: units that can be read, in order.
        is_complete: True if ``units`` has all documents.
    """

    sidecar = None
    num_documents = num_tokens = None

    def __init__(self, corpus: TextCorpus, reader: str, cache: IndexCache) -> None:
        self.prefix, self.fingerprint = corpus.path, corpus.source
        self.units: list[Unit] = []
        self.is_complete = False
        self._corpus, self._reader, self._cache = corpus, reader, cache
        self._firsts: list[int] = []
        self._num_documents = 0
        self._folder: ShardFolder | None = None
        self._file: IndexedDataset | None = None
        self._update()

    @property
    def document_lengths(self) -> np.ndarray:
        """int32, tokens per document that is encoded."""
        return np.concatenate([unit.lengths for unit in self.units] or [np.zeros(0, np.int32)])

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError("text that is being encoded cannot be sent to another process; it can be forked")

    def wait_until(self, is_ready: Callable[[], bool]) -> None:
        """Wait for ``is_ready``, which is called after each update of ``units``.

        Raises:
            DataError: the text cannot be encoded.
        """

        def is_ready_after_update() -> bool:
            self._update()
            return is_ready()

        self._corpus.wait_until(is_ready_after_update)

    def read(self, document: int, offset: int = 0, length: int | None = None) -> np.ndarray:
        """Copy ``length`` tokens of ``document``, starting at ``offset`` (None: up to the document's end)."""
        unit = self.units[bisect_right(self._firsts, document) - 1]
        size = int(unit.lengths[document - unit.first_document])
        length = size - offset if length is None else length
        if self._file is not None:
            return self._file.read(document, offset, length)
        start = int(unit.starts[document - unit.first_document]) + offset
        try:
            return unit.read_tokens(start, length)
        except (OSError, DataError):  # joined and deleted on another host
            self._corpus.wait_until(self._corpus.is_finished)
            self._open_file()
            assert self._file is not None
            return self._file.read(document, offset, length)

    def _update(self) -> None:
        """Add the units that were finished since the last call."""
        if self.is_complete:
            return
        if self._corpus.is_finished():
            self._open_file()
            assert self._file is not None
            file, first = self._file, self._num_documents
            for begin in range(first, file.num_documents, _UNIT_OF_FILE):
                end = min(begin + _UNIT_OF_FILE, file.num_documents)
                self._add(np.asarray(file.document_lengths[begin:end]), _reader_of(file, begin, end))
            self.is_complete = True
            return
        with suppress(OSError, ValueError, KeyError, TypeError):  # the unit is not finished, or units are being joined
            while self._add_shard(len(self.units)):
                pass

    def _add_shard(self, unit_idx: int) -> bool:
        """Add unit ``unit_idx`` of the job if it is finished."""
        content = (self._corpus.shard_folder / f"unit-{unit_idx:06d}.json").read_bytes()
        shard = Shard.from_json(content)
        if self._folder is None or self._folder.plan != shard.plan:
            plan = job_plan.read_plan(self._corpus.shard_folder)
            if plan is None or plan.digest() != shard.plan:
                return False
            self._folder = job_plan.make_shard_folder(self._corpus.shard_folder, plan, is_shared=False)
        folder = self._folder
        token_path = folder.path(unit_idx, "bin")
        if token_path.stat().st_size != shard.file_stats["bin"][0]:
            return False
        lengths = np.fromfile(folder.path(unit_idx, "len"), "<i4")
        lengths, dtype = lengths[lengths > 0], folder.dtype
        file: Reader | None = READERS[self._reader](token_path) if len(lengths) else None

        def read_tokens(start: int, count: int) -> np.ndarray:
            assert file is not None
            return file.read(start * dtype.itemsize, count * dtype.itemsize).view(dtype)

        self._add(lengths, read_tokens)
        return True

    def _add(self, lengths: np.ndarray, read_tokens: Callable[[int, int], np.ndarray]) -> None:
        self.units.append(Unit(self._num_documents, lengths, read_tokens))
        self._firsts.append(self._num_documents)
        self._num_documents += len(lengths)

    def _open_file(self) -> None:
        if self._file is None:
            self._file = IndexedDataset(self._corpus.prefix, reader=self._reader, cache=self._cache)


def _reader_of(file: IndexedDataset, begin: int, end: int) -> Callable[[int, int], np.ndarray]:
    """Return a function that reads tokens relative to document ``begin`` of a finished token file."""
    first_token = int(file.starts_of(begin, end)[0])
    return lambda start, count: file.read_tokens(first_token + start, count)
