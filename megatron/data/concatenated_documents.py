"""ConcatenatedDocuments: find documents that contain a token range when documents are concatenated in an order.

A segment of an order contains the document at each position and, for every ``stride``-th position, the number of tokens
that precede it in the segment. The final step of a search reads the sizes of ``stride`` documents.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from megatron.data.documents import DocumentSlice, gather_lengths


class IndexRange:
    """The indices ``start`` ... ``stop - 1``, computed when they are sliced: they take no memory."""

    def __init__(self, start: int, stop: int) -> None:
        self._range = range(start, stop)

    def __len__(self) -> int:
        return len(self._range)

    def __getitem__(self, positions: slice) -> np.ndarray:
        indices = self._range[positions]
        return np.arange(indices.start, indices.stop, dtype=np.int64)


class Segment(NamedTuple):
    """A segment of an order.

    Args:
        starts: int64, tokens in the segment before every ``stride``-th position, then in the whole segment.
        document_indices: int32 or int64, the document at each position.
    """

    starts: np.ndarray
    document_indices: np.ndarray | IndexRange
    stride: int


class ConcatenatedDocuments:
    """Documents concatenated in the order of ``segments``.

    Args:
        document_lengths: tokens per document in the file; may be an unaligned view of a mapped file.
    """

    def __init__(self, document_lengths: np.ndarray, segments: Sequence[Segment]) -> None:
        self._document_lengths, self._segments = document_lengths, segments
        self._ends = list(accumulate(int(segment.starts[-1]) for segment in segments))

    def slices(self, start: int, stop: int) -> list[DocumentSlice]:
        """Find the nonempty document slices that make up tokens ``start`` ... ``stop - 1``."""
        slices: list[DocumentSlice] = []
        for documents, bounds in self._blocks(start):
            first = int(bounds.searchsorted(start, "right")) - 1
            last = int(bounds.searchsorted(stop, "left"))
            slice_bounds = bounds[first : last + 1].tolist()
            for document, begin, end in zip(
                documents[first:last].tolist(), slice_bounds, slice_bounds[1:], strict=False
            ):
                slice_end = min(end, stop)
                if slice_end > start:
                    slices.append(DocumentSlice(document, start - begin, slice_end - start))
                    start = slice_end
            if start >= stop:
                break
        return slices

    def start_of(self, position: int) -> int:
        """Count the tokens before the document at ``position`` of the order."""
        base = 0
        for segment in self._segments:
            num_documents = len(segment.document_indices)
            if position < num_documents:
                block = position // segment.stride
                documents = segment.document_indices[block * segment.stride : position]
                lengths = gather_lengths(self._document_lengths, documents)
                return base + int(segment.starts[block]) + int(lengths.sum(dtype=np.int64))
            position -= num_documents
            base += int(segment.starts[-1])
        raise IndexError(f"the order has no document at the position {position} after its end")

    def _blocks(self, start: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield (documents, token bounds) per block of positions, starting with the block of token ``start``."""
        first_segment = bisect_right(self._ends, start)
        for segment_idx in range(first_segment, len(self._segments)):
            starts, document_indices, stride = self._segments[segment_idx]
            base = self._ends[segment_idx - 1] if segment_idx else 0
            first = int(starts.searchsorted(start - base, "right")) - 1 if segment_idx == first_segment else 0
            for block in range(first, len(starts) - 1):
                documents = document_indices[block * stride : (block + 1) * stride]
                bounds = np.zeros(len(documents) + 1, np.int64)
                np.cumsum(gather_lengths(self._document_lengths, documents), out=bounds[1:])
                bounds += base + int(starts[block])
                yield documents, bounds
