"""Order of --shuffle-window N: documents in corpus order, and samples shuffled within windows of N samples.

Sample i of an epoch is in window ``i // N``. It depends only on the text up to the end of its window, so training can
start while the rest of the corpus is being encoded. Finished token files have the same order.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator

import numpy as np

from megatron.data.concatenated_documents import ConcatenatedDocuments, IndexRange, Segment
from megatron.data.documents import Documents, DocumentSlice, count_documents, count_tokens, gather_lengths
from megatron.data.growing_tokens import GrowingTokens, StreamedSplit
from megatron.data.indexed_dataset import IndexedDataset
from megatron.data.permutation import Permutation
from megatron.errors import DataError

_STRIDE = 64
_BLOCK = 1 << 18
_MAX_CACHED_WINDOWS = 8


class WindowIndex:
    """Endless samples int64[length + overlap] in the order of --shuffle-window.

    ``num_tokens`` and ``per_epoch`` are 0 for text that is being encoded, whose size is unknown.

    Args:
        documents: range or ascending indices of the documents to use; for ``GrowingTokens``, the streamed split.
        length, overlap: tokens between the starts of two samples, and further tokens that a sample shares with the
            next one.
        seed: order seed; the same on all ranks.
        window: N, samples per window; the last window of an epoch may have fewer.
        length_flag: the flag and value that determine ``length``, for error messages.

    Raises:
        DataError: the documents have fewer tokens than one sample.
    """

    def __init__(
        self,
        token_file: IndexedDataset | GrowingTokens,
        *,
        documents: Documents | StreamedSplit,
        length: int,
        overlap: int,
        seed: int,
        window: int,
        length_flag: str,
    ) -> None:
        self.token_file, self.documents, self.length, self.overlap = token_file, documents, length, overlap
        self.seed, self.window = seed, window
        self.num_tokens = self.per_epoch = 0
        self._length_flag = length_flag
        self._parts: list[tuple[int, ConcatenatedDocuments]] = []
        self._ends: list[int] = []
        self._num_read_units = 0
        self._permutations: OrderedDict[tuple[int, int], Permutation] = OrderedDict()
        if isinstance(token_file, GrowingTokens):
            self._wait_for_tokens(window * length + overlap)
            return
        assert not isinstance(documents, StreamedSplit)
        self.num_tokens = count_tokens(token_file.document_lengths, documents)
        self.per_epoch = self._samples_in(self.num_tokens)
        for begin in range(0, count_documents(documents), _BLOCK):
            end = min(begin + _BLOCK, count_documents(documents))
            if isinstance(documents, np.ndarray):
                self._append(0, token_file.document_lengths, documents[begin:end])
            else:
                self._append(0, token_file.document_lengths, IndexRange(documents[0] + begin, documents[0] + end))

    def samples_of(self, document: int, first: int, stop: int) -> list[int]:
        """Find the samples from ``first`` to ``stop`` - 1 with tokens of ``document``, by reading all of them."""
        samples = range(first, stop)
        return [index for index in samples if any(part.document == document for part in self.slices(index))]

    def slices(self, index: int) -> list[DocumentSlice]:
        """Find the nonempty document slices in sample ``index``; wait until its window is encoded.

        Raises:
            DataError: the text cannot be encoded.
        """
        if index < 0:
            raise IndexError(f"sample indices start at 0, got {index}")
        per_epoch = self.per_epoch
        if isinstance(self.token_file, GrowingTokens):
            num_windows = int(index) // self.window + 1
            self._wait_for_tokens(num_windows * self.window * self.length + self.overlap)
            per_epoch = self._samples_in(self._num_available) if self._is_complete else max(int(index) + 1, self.window)
        epoch, index_in_epoch = divmod(int(index), per_epoch)
        window_idx, position = divmod(index_in_epoch, self.window)
        is_last = isinstance(self.token_file, IndexedDataset) or self._is_complete
        size = min(self.window, per_epoch - window_idx * self.window) if is_last else self.window
        sample = window_idx * self.window + self._permutation(epoch, window_idx, size)(position)
        return self._slices_between(sample * self.length, (sample + 1) * self.length + self.overlap)

    @property
    def _num_available(self) -> int:
        """Tokens of the split that are encoded."""
        return self._ends[-1] if self._ends else 0

    @property
    def _is_complete(self) -> bool:
        """True if all units of growing tokens have been added."""
        tokens = self.token_file
        return isinstance(tokens, GrowingTokens) and tokens.is_complete and self._num_read_units == len(tokens.units)

    def _samples_in(self, num_tokens: int) -> int:
        per_epoch = max(num_tokens - self.overlap, 0) // self.length
        if per_epoch < 1:
            raise DataError(
                f"{self.token_file.prefix}: the documents of a split have {num_tokens} tokens, but a sample of "
                f"{self._length_flag} needs {self.length + self.overlap}. Reduce {self._length_flag.split()[0]} or add "
                "more data."
            )
        return per_epoch

    def _wait_for_tokens(self, num_tokens: int) -> None:
        """Wait until ``num_tokens`` tokens of the split, or the whole corpus, are encoded."""
        tokens = self.token_file
        assert isinstance(tokens, GrowingTokens)

        def has_tokens() -> bool:
            self._add_units(tokens)
            return self._num_available >= num_tokens or self._is_complete

        if not has_tokens():
            tokens.wait_until(has_tokens)
        if self._is_complete:
            self._samples_in(self._num_available)

    def _add_units(self, tokens: GrowingTokens) -> None:
        assert isinstance(self.documents, StreamedSplit)
        for unit in tokens.units[self._num_read_units :]:
            self._append(unit.first_document, unit.lengths, self.documents.select(unit))
            self._num_read_units += 1

    def _append(self, first_document: int, lengths: np.ndarray, document_indices: np.ndarray | IndexRange) -> None:
        """Append documents; ``document_indices`` count from ``first_document``, where ``lengths`` begins."""
        num_blocks = -(-len(document_indices) // _STRIDE)
        starts = np.zeros(num_blocks + 1, np.int64)
        if num_blocks:
            strides = np.arange(0, len(document_indices), _STRIDE)
            block_tokens = np.add.reduceat(gather_lengths(lengths, document_indices[:]), strides, dtype=np.int64)
            np.cumsum(block_tokens, out=starts[1:])
        self._parts.append(
            (first_document, ConcatenatedDocuments(lengths, [Segment(starts, document_indices, _STRIDE)]))
        )
        self._ends.append(self._num_available + int(starts[-1]))

    def _permutation(self, epoch: int, window_idx: int, size: int) -> Permutation:
        key = (epoch, window_idx)
        if key not in self._permutations:
            self._permutations[key] = Permutation(size, "window", self.seed, epoch, window_idx)
            if len(self._permutations) > _MAX_CACHED_WINDOWS:
                self._permutations.popitem(last=False)
        return self._permutations[key]

    def _slices_between(self, start: int, stop: int) -> list[DocumentSlice]:
        return list(self._iterate_slices(start, stop))

    def _iterate_slices(self, start: int, stop: int) -> Iterator[DocumentSlice]:
        """Yield the slices of tokens ``start`` ... ``stop - 1`` of the concatenated documents."""
        for part_idx in range(bisect_right(self._ends, start), len(self._parts)):
            base = self._ends[part_idx - 1] if part_idx else 0
            end = min(stop, self._ends[part_idx])
            first_document, documents = self._parts[part_idx]
            for document, offset, length in documents.slices(start - base, end - base):
                yield DocumentSlice(first_document + document, offset, length)
            start = end
            if start >= stop:
                return
