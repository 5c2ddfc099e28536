"""The order of the documents of one epoch, and what lies where when they are laid end to end in it.

The order is a permutation by (seed, epoch). It is kept in segments of some million places: the document at each place
(int32 while that holds the numbers) and, for every 64th place, the tokens of the segment before it. A search ends with
the sizes of 64 documents. One segment stays in memory; several are shared by the processes of a host through a
``Cache``, as nothing else of an epoch grows with the corpus.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Iterator
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from megatron.data.cache import Cache
from megatron.data.documents import Documents, count_of, documents_key, number_type, numbers_at, sizes_of
from megatron.data.permutation import Permutation
from megatron.data.token_source import Piece, TokenSource

FORMAT = 1
SEGMENT = 1 << 22
_STRIDE = 64
_BLOCK = 1 << 18
_EPOCHS_KEPT = 2


class _Segment(NamedTuple):
    starts: np.ndarray  # int64, tokens of this segment before every _STRIDE-th place, and last of all its places
    numbers: np.ndarray  # int32 or int64, the document at each place


class DocumentOrder:
    """``documents`` in the order of one epoch, laid end to end.

    Args:
        cache: where several segments are kept; None: in this process's memory.
    """

    def __init__(
        self, source: TokenSource, documents: Documents, *, seed: int, epoch: int, cache: Cache | None = None
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
