"""The pieces that documents are cut into for packing, in order of length.

A sample of L inputs and L labels is L + 1 tokens. A document of at most that many is one piece. A longer one is cut
every L tokens, and neighbouring pieces share one token: the last label of the one is the first input of the other. So
each token of a document but its first is a label exactly once. Of a long document only the last piece is packed, for
the others fill a sample each. A document of fewer than two tokens has no label and is left out.

What is kept is one number a document, 4 bytes while it fits: the documents sorted by the length of their last piece (a
counting sort, in blocks). It is the same for all epochs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from megatron.data.documents import Documents, number_type, sizes_of

Keep = Callable[[str, Callable[[], np.ndarray]], np.ndarray]
"""Returns the array that the function makes, or the one kept under this name since another process made it."""

_BLOCK = 1 << 20


class Pieces:
    """Pieces of the documents of one split.

    ``last_counts`` int64[capacity + 1] says how many last pieces have each length; ``num_full`` counts the others. The
    documents whose last piece has n tokens are ``by_length[starts[n] : starts[n] + last_counts[n]]``.
    """

    def __init__(
        self, sizes: np.ndarray, documents: Documents, capacity: int, keep: Keep = lambda name, make: make()
    ) -> None:
        """Look at ``sizes``, those of all documents of the file, three times."""
        cut = _Cut(sizes, documents, capacity)
        self.step = capacity - 1
        *counts, self.num_tokens, num_long = keep("counts", cut.counts).tolist()
        self.last_counts = np.array(counts, np.int64)
        self.starts: list[int] = (self.last_counts.cumsum() - self.last_counts).tolist()
        self.by_length = keep("by-length", lambda: cut.sorted_by_length(np.array(counts)))
        long = keep("long", lambda: cut.long(num_long))
        self._long, self._full_ends = long[:num_long], long[num_long:]
        self.num_full = int(self._full_ends[-1]) if num_long else 0
        self.last_counts[:2] = 0

    def full(self, place: int) -> tuple[int, int]:
        """Return (document, offset) of a piece that fills a sample and is not the last of its document."""
        row = int(np.searchsorted(self._full_ends, place, "right"))
        before = int(self._full_ends[row - 1]) if row else 0
        return int(self._long[row]), (place - before) * self.step

    @property
    def num_bytes(self) -> int:
        """How much memory this takes."""
        return self.by_length.nbytes + self._long.nbytes + self._full_ends.nbytes


class _Cut:
    """Computes the arrays of ``Pieces``."""

    def __init__(self, sizes: np.ndarray, documents: Documents, capacity: int) -> None:
        self.sizes, self.documents, self.capacity = sizes, documents, capacity

    def counts(self) -> np.ndarray:
        """Return how many last pieces have 0, 1 ... capacity tokens, then the number of tokens, of long documents."""
        counts, num_tokens, num_long = np.zeros(self.capacity + 1, np.int64), 0, 0
        for _, sizes in self._blocks():
            counts += np.bincount(self._last(sizes), minlength=len(counts))
            num_tokens += int(sizes.sum())
            num_long += int((sizes > self.capacity).sum())
        return np.append(counts, [num_tokens, num_long])

    def sorted_by_length(self, counts: np.ndarray) -> np.ndarray:
        """Return the documents in the order of their last piece's length, those of one length in their own order."""
        result = np.empty(int(counts.sum()), number_type(self.documents))
        key_type = np.uint16 if self.capacity < 1 << 16 else np.uint32  # numpy sorts 16 bits by counting
        filled = np.cumsum(counts) - counts
        for numbers, sizes in self._blocks():
            lengths = self._last(sizes)
            order = np.argsort(lengths.astype(key_type), kind="stable")
            here = np.bincount(lengths, minlength=len(counts))
            shift = filled - (np.cumsum(here) - here)
            result[np.arange(len(order)) + np.repeat(shift, here)] = numbers[order]
            filled += here
        return result

    def long(self, num_long: int) -> np.ndarray:
        """Return int64[2 x num_long]: documents of more than one piece; the full pieces of each and all before it."""
        result, filled = np.empty((2, num_long), np.int64), 0
        for numbers, sizes in self._blocks():
            is_long = sizes > self.capacity
            stop = filled + int(is_long.sum())
            result[0, filled:stop], result[1, filled:stop] = numbers[is_long], self._num_full(sizes[is_long])
            filled = stop
        np.cumsum(result[1], out=result[1])
        return result.ravel()

    def _num_full(self, sizes: np.ndarray) -> np.ndarray:
        return np.maximum(sizes - 2, 0) // (self.capacity - 1)

    def _last(self, sizes: np.ndarray) -> np.ndarray:
        return sizes - self._num_full(sizes) * (self.capacity - 1)

    def _blocks(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield document numbers and their sizes, both int64."""
        documents, sizes = self.documents, self.sizes
        start, stop = documents if isinstance(documents, tuple) else (0, len(documents))
        for first in range(start, stop, _BLOCK):
            last = min(first + _BLOCK, stop)
            if isinstance(documents, tuple):
                yield np.arange(first, last), sizes[first:last].astype(np.int64)
            else:
                yield documents[first:last].astype(np.int64), sizes_of(sizes, documents[first:last]).astype(np.int64)
