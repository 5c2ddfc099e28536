"""The pieces that documents are cut into for packing, in order of length.

A sample of L inputs and L labels is L + 1 tokens. A document of at most that many is one piece. A longer one is cut
every L tokens, and neighbouring pieces share one token: the last label of the one is the first input of the other. So
each token of a document but its first is a label exactly once. Of a long document only the last piece is packed, for
the others fill a sample each. A document of fewer than two tokens has no label and is left out.

Pieces are kept as one number a document, 4 bytes while it fits, sorted by length in blocks (a counting sort).
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

Documents = tuple[int, int] | np.ndarray

_BLOCK = 1 << 20


class Pieces:
    """Pieces of the documents of one split.

    ``last_counts`` int64[capacity + 1] says how many last pieces have each length; ``num_full`` counts the others.
    """

    def __init__(self, sizes: np.ndarray, documents: Documents, capacity: int) -> None:
        """Look at all ``sizes`` twice; ``documents`` are (start, stop), or ascending numbers."""
        self._step = capacity - 1
        self._counts, self.num_tokens, num_long = np.zeros(capacity + 1, np.int64), 0, 0
        for _, block in _blocks(sizes, documents):
            self._counts += np.bincount(self._last(block), minlength=capacity + 1)
            self.num_tokens += int(block.sum())
            num_long += int((block > capacity).sum())
        self._starts = np.cumsum(self._counts) - self._counts
        self._sort(sizes, documents, num_long)
        self.last_counts = self._counts.copy()
        self.last_counts[:2] = 0

    def last(self, length: int, places: np.ndarray) -> np.ndarray:
        """Return the documents whose last piece has ``length`` tokens, those at ``places`` among them."""
        return self._by_length[self._starts[length] + places]

    def full(self, place: int) -> tuple[int, int]:
        """Return (document, offset) of a piece that fills a sample and is not the last of its document."""
        row = int(np.searchsorted(self._full_starts, place, "right")) - 1
        return int(self._long[row]), (place - int(self._full_starts[row])) * self._step

    @property
    def num_bytes(self) -> int:
        """How much memory this takes."""
        return self._by_length.nbytes + self._long.nbytes + self._full_starts.nbytes + 3 * self._counts.nbytes

    def _last(self, sizes: np.ndarray) -> np.ndarray:
        """Return the length of each document's last piece."""
        return sizes - self._num_before_last(sizes) * self._step

    def _num_before_last(self, sizes: np.ndarray) -> np.ndarray:
        return np.maximum(sizes - 2, 0) // self._step

    def _sort(self, sizes: np.ndarray, documents: Documents, num_long: int) -> None:
        highest = documents[1] if isinstance(documents, tuple) else int(documents.max(initial=0))
        number = np.int32 if highest <= np.iinfo(np.int32).max else np.int64
        self._by_length = np.empty(int(self._counts.sum()), number)
        self._long, full = np.empty(num_long, number), np.empty(num_long, np.int64)
        filled, next_long = self._starts.copy(), 0
        for numbers, block in _blocks(sizes, documents):
            lengths = self._last(block)
            order = np.argsort(lengths.astype(_key_type(self._step + 1)), kind="stable")
            counts = np.bincount(lengths, minlength=len(filled))
            shift = filled - (np.cumsum(counts) - counts)
            self._by_length[np.arange(len(order)) + np.repeat(shift, counts)] = numbers[order]
            filled += counts
            is_long = block > self._step + 1
            stop = next_long + int(is_long.sum())
            self._long[next_long:stop] = numbers[is_long]
            full[next_long:stop] = self._num_before_last(block[is_long])
            next_long = stop
        self._full_starts = np.cumsum(full) - full
        self.num_full = int(full.sum())


def _key_type(capacity: int) -> type[np.unsignedinteger]:
    """Return a type that numpy sorts by counting where lengths fit it."""
    return np.uint16 if capacity <= np.iinfo(np.uint16).max else np.uint32


def _blocks(sizes: np.ndarray, documents: Documents) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield document numbers and their sizes, both int64."""
    start, stop = documents if isinstance(documents, tuple) else (0, len(documents))
    for first in range(start, stop, _BLOCK):
        last = min(first + _BLOCK, stop)
        if isinstance(documents, tuple):
            yield np.arange(first, last), sizes[first:last].astype(np.int64)
        else:
            numbers = documents[first:last].astype(np.int64)
            yield numbers, np.asarray(sizes[numbers], np.int64)
