"""Document order of an epoch and windows over it (Megatron's document_index and sample_index, computed)."""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from megatron.data.cache import IndexCache
from megatron.data.documents import (
    Documents,
    Piece,
    TokenSource,
    count_of,
    documents_key,
    num_tokens_of,
    number_type,
    numbers_at,
    sizes_of,
)
from megatron.data.indexed_dataset import IndexedDataset
from megatron.data.permutation import Permutation
from megatron.errors import DataError, SampleError

# The order of the documents of one epoch, and what lies where when they are laid end to end in it.
#
# The order is a permutation by (seed, epoch). It is kept in segments of some million places: the document at each place
# (int32 while that holds the numbers) and, for every 64th place, the tokens of the segment before it. A search ends
# with the sizes of 64 documents. One segment stays in memory; several are shared by the processes of a host through a
# ``IndexCache``, as nothing else of an epoch grows with the corpus.

FORMAT = 1
SEGMENT = 1 << 22
_STRIDE = 64
_BLOCK = 1 << 18
_EPOCHS_KEPT = 2


class _Segment(NamedTuple):
    starts: np.ndarray  # int64, tokens of this segment before every _STRIDE-th place, and last of all its places
    numbers: np.ndarray  # int32 or int64, the document at each place


class DocumentIndex:
    """``documents`` in the order of one epoch, laid end to end.

    Args:
        cache: where several segments are kept; None: in this process's memory.
    """

    def __init__(
        self, source: TokenSource, documents: Documents, *, seed: int, epoch: int, cache: IndexCache | None = None
    ) -> None:
        self._sizes, self._documents = source.sizes, documents
        self._count, self._type = count_of(documents), number_type(documents)
        self._permutation = Permutation(self._count, "documents", seed, epoch)
        num_segments = -(-self._count // SEGMENT)
        if cache is None or num_segments <= 1:
            self._segments = [self._build(segment) for segment in range(num_segments)]
        else:
            opening = _name_of_epochs(source, documents, seed)
            contents = cache.arrays(f"{opening}{epoch}", num_segments, self._content)
            cache.keep_newest(opening, _EPOCHS_KEPT)
            self._segments = [self._from_content(each, segment) for segment, each in enumerate(contents)]
        self._ends = list(accumulate(int(segment.starts[-1]) for segment in self._segments))

    def pieces(self, start: int, stop: int) -> list[Piece]:
        """Return what tokens ``start`` ... ``stop - 1`` of all laid end to end are made of, no piece of them empty."""
        found: list[Piece] = []
        for numbers, bounds in self._blocks(start):
            first = int(bounds.searchsorted(start, "right")) - 1
            last = int(bounds.searchsorted(stop, "left"))
            near = bounds[first : last + 1].tolist()
            for number, begin, end in zip(numbers[first:last].tolist(), near, near[1:], strict=False):
                until = min(end, stop)
                if until > start:
                    found.append(Piece(number, start - begin, until - start))
                    start = until
            if start >= stop:
                break
        return found

    def _blocks(self, start: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield blocks of places from that of token ``start`` on: their documents, and where these begin and end."""
        at = bisect_right(self._ends, start)
        for segment in range(at, len(self._segments)):
            starts, numbers = self._segments[segment]
            base = self._ends[segment - 1] if segment else 0
            first = int(starts.searchsorted(start - base, "right")) - 1 if segment == at else 0
            for block in range(first, len(starts) - 1):
                documents = numbers[block * _STRIDE : (block + 1) * _STRIDE]
                bounds = np.zeros(len(documents) + 1, np.int64)
                np.cumsum(sizes_of(self._sizes, documents), out=bounds[1:])
                bounds += base + int(starts[block])
                yield documents, bounds

    def _content(self, segment: int) -> list[np.ndarray]:
        """Return a segment as one file of the cache holds it."""
        starts, numbers = self._build(segment)
        return [starts.view(np.uint8), numbers.view(np.uint8)]

    def _from_content(self, content: np.ndarray, segment: int) -> _Segment:
        num_bytes = 8 * (_num_blocks(self._length(segment)) + 1)
        return _Segment(content[:num_bytes].view(np.int64), content[num_bytes:].view(self._type))

    def _length(self, segment: int) -> int:
        return min(SEGMENT, self._count - segment * SEGMENT)

    def _build(self, segment: int) -> _Segment:
        """Compute a segment, in parts that stay small."""
        length = self._length(segment)
        numbers = np.empty(length, self._type)
        starts = np.zeros(_num_blocks(length) + 1, np.int64)
        for begin in range(0, length, _BLOCK):
            part = numbers[begin : begin + _BLOCK]
            self._permutation.fill(part, segment * SEGMENT + begin)
            part[:] = numbers_at(self._documents, part)
            firsts = np.arange(0, len(part), _STRIDE)
            sums = np.add.reduceat(sizes_of(self._sizes, part), firsts, dtype=np.int64)
            starts[1 + begin // _STRIDE :][: len(sums)] = sums
        return _Segment(np.cumsum(starts, out=starts), numbers)


def _num_blocks(length: int) -> int:
    return -(-length // _STRIDE)


def _name_of_epochs(source: TokenSource, documents: Documents, seed: int) -> str:
    """Return what the names of all epochs of one order start with: it changes with all that the order depends on."""
    key = repr((FORMAT, SEGMENT, _STRIDE, source.fingerprint, documents_key(documents), seed))
    return f"order-{hashlib.sha256(key.encode()).hexdigest()[:16]}-epoch-"


# Windows over a token file, in an order that is computed: what samples of both models are cut from.
#
# Each epoch permutes its documents, lays them end to end (T tokens), cuts windows of ``length + overlap`` tokens of
# which neighbours share ``overlap``, drops the tail, and permutes the windows. Nothing crosses epochs. The order
# follows from (seed, epoch) alone, so it is the same in every layout and no process needs another one's index.

__all__ = ["Piece", "SampleIndex", "TokenSource", "read_pieces"]


class _Epoch(NamedTuple):
    documents: DocumentIndex
    windows: Permutation


class SampleIndex:
    """Window i, for any i >= 0, is int64[length + overlap]; i // per_epoch is its epoch.

    Args:
        documents: (start, stop) of the documents to take, or their ascending numbers.
        seed: the same on all ranks.
        asked_by: the flag with its value that asks for windows of this length; an error names it.
        cache: where the order of many documents is kept for all processes of this host; None: in each one's memory.

    Raises:
        DataError: the documents hold less than one window.
    """

    def __init__(
        self,
        token_file: TokenSource,
        *,
        documents: Documents,
        length: int,
        overlap: int,
        seed: int,
        asked_by: str,
        cache: IndexCache | None = None,
    ) -> None:
        self.token_file, self.documents, self.length, self.overlap = token_file, documents, length, overlap
        self.seed, self.cache = seed, cache
        self.num_tokens = num_tokens_of(token_file.sizes, documents)
        self.per_epoch = max(self.num_tokens - overlap, 0) // length
        if self.per_epoch < 1:
            raise DataError(
                f"{token_file.prefix}: {_named(documents)} hold {self.num_tokens} tokens; a sample "
                f"of {asked_by} needs {length + overlap}. Shorten {asked_by.split()[0]} or give more data."
            )
        self._epochs: dict[int, _Epoch] = {}

    def __getitem__(self, index: int) -> np.ndarray:
        """Return the tokens of window ``index``."""
        return self.read(index, self.pieces(index))

    def pieces(self, index: int) -> list[Piece]:
        """Return the pieces of documents that window ``index`` is made of, none of them empty."""
        if index < 0:
            raise IndexError(f"samples count from 0, got {index}")
        number, index_in_epoch = divmod(int(index), self.per_epoch)
        epoch = self._epoch(number)
        start = epoch.windows(index_in_epoch) * self.length
        return epoch.documents.pieces(start, start + self.length + self.overlap)

    def run(self, epoch: int, start: int, length: int) -> list[Piece]:
        """Return the pieces of ``length`` tokens from ``start`` on, as the documents of an epoch lie end to end."""
        return self._epoch(epoch).documents.pieces(start, start + length)

    def read(self, index: int, pieces: Sequence[Piece]) -> np.ndarray:
        """Return the tokens of ``pieces``: ``read_pieces`` of this file."""
        return read_pieces(self.token_file, index, pieces)

    def _epoch(self, number: int) -> _Epoch:
        epoch = self._epochs.get(number)
        if epoch is None:
            while len(self._epochs) >= _EPOCHS_KEPT:
                del self._epochs[next(iter(self._epochs))]
            order = DocumentIndex(self.token_file, self.documents, seed=self.seed, epoch=number, cache=self.cache)
            epoch = _Epoch(order, Permutation(self.per_epoch, "samples", self.seed, number))
            self._epochs[number] = epoch
        return epoch


def read_pieces(source: TokenSource, index: int, pieces: Sequence[Piece]) -> np.ndarray:
    """Return the tokens of ``pieces`` one after another as int64.

    Raises:
        SampleError: they cannot be read; names the sample ``index``, the document and the place in the file.
    """
    tokens = np.empty(sum(piece.length for piece in pieces), np.int64)
    filled = 0
    for document, offset, length in pieces:
        try:
            tokens[filled : filled + length] = source.read(document, offset, length)
        except Exception as error:
            raise SampleError(
                f"sample {index} cannot be read: document {document}, tokens {offset}:{offset + length}, "
                f"{_place(source, document, offset)}: {type(error).__name__}: {error}"
            ) from error
        filled += length
    return tokens


def prefetch_pieces(source: TokenSource, pieces: Sequence[Piece]) -> None:
    """Have ``pieces`` fetched for ``read_pieces``, where the tokens of ``source`` lie in an object store."""
    if isinstance(source, IndexedDataset):
        source.prefetch(pieces)


def _named(documents: Documents) -> str:
    if isinstance(documents, np.ndarray):
        return f"{count_of(documents)} documents of a split by hash"
    return f"documents {documents[0]}:{documents[1]}"


def _place(source: TokenSource, document: int, offset: int) -> str:
    if isinstance(source, IndexedDataset):
        return f"byte {source.byte_offset(document, offset)} of {source.token_path}"
    return source.prefix


# Arrays put together from stretches of another one, all at once.


def runs(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Return starts[0], starts[0] + 1, ... (``lengths[0]`` numbers), then as many from starts[1] on, and so forth."""
    ends = lengths.cumsum()
    numbers = (starts - ends + lengths).repeat(lengths)
    numbers += np.arange(len(numbers))
    return numbers
