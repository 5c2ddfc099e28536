"""An epoch's document order and windows over it: Megatron-LM's document and sample index, computed on demand."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from megatron.data.cache import IndexCache
from megatron.data.concatenated_documents import ConcatenatedDocuments, Segment
from megatron.data.documents import (
    Documents,
    DocumentSlice,
    TokenSource,
    count_documents,
    count_tokens,
    documents_key,
    gather_lengths,
    index_dtype,
    indices_at,
    position_of,
    windows_of,
)
from megatron.data.indexed_dataset import IndexedDataset
from megatron.data.permutation import Permutation
from megatron.errors import DataError, SampleError

# One epoch's document order, and the documents' token positions when they are concatenated in this order.
#
# The order is a permutation computed from (seed, epoch). It is stored in segments of 4 million positions, with document
# indices in int32 if they fit. A single segment is stored in memory; several segments are shared by a host's
# processes through an ``IndexCache``. No other epoch data grow with the corpus.

FORMAT = 1
SEGMENT = 1 << 22
_STRIDE = 64
_BLOCK = 1 << 18
_MAX_CACHED_EPOCHS = 2


class DocumentIndex(ConcatenatedDocuments):
    """``documents`` concatenated in one epoch's order.

    Args:
        cache: stores the segments if there are several; None: they are stored in this process's memory.
    """

    def __init__(
        self, source: TokenSource, documents: Documents, *, seed: int, epoch: int, cache: IndexCache | None = None
    ) -> None:
        self._document_lengths, self._documents = source.document_lengths, documents
        self._num_documents, self._index_dtype = count_documents(documents), index_dtype(documents)
        self._permutation = Permutation(self._num_documents, "documents", seed, epoch)
        num_segments = -(-self._num_documents // SEGMENT)
        if cache is None or num_segments <= 1:
            segments = [self._build(segment) for segment in range(num_segments)]
        else:
            name_prefix = _cache_name_prefix(source, documents, seed)
            contents = cache.arrays(f"{name_prefix}{epoch}", num_segments, self._segment_arrays)
            cache.keep_newest(name_prefix, _MAX_CACHED_EPOCHS)
            segments = [self._segment_from_content(content, segment) for segment, content in enumerate(contents)]
        super().__init__(source.document_lengths, segments)

    def token_range(self, document: int) -> tuple[int, int] | None:
        """Find the tokens (start, stop) of a document in the concatenation; None if it is not among the documents."""
        position = position_of(self._documents, document)
        if position is None:
            return None
        start = self.start_of(self._permutation.inverse(position))
        return start, start + int(self._document_lengths[document])

    def _segment_arrays(self, segment: int) -> list[np.ndarray]:
        """Compute the arrays to store in a segment's cache file."""
        starts, document_indices, _ = self._build(segment)
        assert isinstance(document_indices, np.ndarray)  # stored orders are shuffled
        return [starts.view(np.uint8), document_indices.view(np.uint8)]

    def _segment_from_content(self, content: np.ndarray, segment: int) -> Segment:
        """Restore a segment from its cache file ``content``."""
        num_bytes = 8 * (_num_blocks(self._segment_length(segment)) + 1)
        return Segment(content[:num_bytes].view(np.int64), content[num_bytes:].view(self._index_dtype), _STRIDE)

    def _segment_length(self, segment: int) -> int:
        return min(SEGMENT, self._num_documents - segment * SEGMENT)

    def _build(self, segment: int) -> Segment:
        """Compute a segment block by block, to limit the size of temporary arrays."""
        length = self._segment_length(segment)
        document_indices = np.empty(length, self._index_dtype)
        starts = np.zeros(_num_blocks(length) + 1, np.int64)
        for begin in range(0, length, _BLOCK):
            block = document_indices[begin : begin + _BLOCK]
            self._permutation.fill(block, segment * SEGMENT + begin)
            block[:] = indices_at(self._documents, block)
            stride_starts = np.arange(0, len(block), _STRIDE)
            stride_tokens = np.add.reduceat(
                gather_lengths(self._document_lengths, block), stride_starts, dtype=np.int64
            )
            starts[1 + begin // _STRIDE :][: len(stride_tokens)] = stride_tokens
        return Segment(np.cumsum(starts, out=starts), document_indices, _STRIDE)


def _num_blocks(length: int) -> int:
    return -(-length // _STRIDE)


def _cache_name_prefix(source: TokenSource, documents: Documents, seed: int) -> str:
    """Build the cache name prefix for all epochs; it contains a digest of everything that affects the order."""
    key = repr((FORMAT, SEGMENT, _STRIDE, source.fingerprint, documents_key(documents), seed))
    return f"order-{hashlib.sha256(key.encode()).hexdigest()[:16]}-epoch-"


# Windows over a token file in a computed order; GPT and T5 samples are taken from them.
#
# Each epoch permutes its documents, concatenates them (T tokens), splits them into windows with ``length + overlap``
# tokens (neighbours share ``overlap`` tokens), drops the tail, and permutes the windows. No window crosses an epoch
# boundary. The order depends only on (seed, epoch). It is therefore the same in every layout, and processes do not need
# to exchange an index.

__all__ = ["DocumentSlice", "SampleIndex", "TokenSource", "read_slices"]


class _Epoch(NamedTuple):
    documents: DocumentIndex
    windows: Permutation


class SampleIndex:
    """Endless windows int64[length + overlap]; window i belongs to epoch i // per_epoch.

    Args:
        documents: (start, stop) range of documents to use, or their ascending indices.
        seed: order seed; the same on all ranks.
        length_flag: the flag and value that determine ``length``, for error messages.
        cache: shares large corpora's document order between this host's processes; None: each process
            computes the order in its own memory.

    Raises:
        DataError: the documents have fewer tokens than one window.
    """

    def __init__(
        self,
        token_file: TokenSource,
        *,
        documents: Documents,
        length: int,
        overlap: int,
        seed: int,
        length_flag: str,
        cache: IndexCache | None = None,
    ) -> None:
        self.token_file, self.documents, self.length, self.overlap = token_file, documents, length, overlap
        self.seed, self.cache = seed, cache
        self.num_tokens = count_tokens(token_file.document_lengths, documents)
        self.per_epoch = max(self.num_tokens - overlap, 0) // length
        if self.per_epoch < 1:
            raise DataError(
                f"{token_file.prefix}: {_describe_documents(documents)} have {self.num_tokens} tokens, but a sample "
                f"of {length_flag} needs {length + overlap}. Reduce {length_flag.split()[0]} or add more data."
            )
        self._epochs: dict[int, _Epoch] = {}

    def __getitem__(self, index: int) -> np.ndarray:
        """Read the tokens in window ``index``."""
        return self.read(index, self.slices(index))

    def slices(self, index: int) -> list[DocumentSlice]:
        """Find the nonempty document slices in window ``index``."""
        if index < 0:
            raise IndexError(f"sample indices start at 0, got {index}")
        epoch_idx, index_in_epoch = divmod(int(index), self.per_epoch)
        epoch = self._epoch(epoch_idx)
        start = epoch.windows(index_in_epoch) * self.length
        return epoch.documents.slices(start, start + self.length + self.overlap)

    def samples_of(self, document: int, first: int, stop: int) -> list[int]:
        """Find the windows from ``first`` to ``stop`` - 1 with tokens of ``document``, in ascending order."""
        indices: list[int] = []
        for epoch_idx in range(first // self.per_epoch, -(-stop // self.per_epoch)):
            epoch = self._epoch(epoch_idx)
            token_range = epoch.documents.token_range(document)
            if token_range is None:
                return []
            windows = windows_of(*token_range, self.length, self.overlap)
            indices += [
                epoch_idx * self.per_epoch + epoch.windows.inverse(window)
                for window in windows
                if window < self.per_epoch
            ]
        return sorted(index for index in indices if first <= index < stop)

    def slices_in_epoch(self, epoch: int, start: int, length: int) -> list[DocumentSlice]:
        """Find the slices for the ``length`` tokens from ``start`` on in an epoch's concatenated documents."""
        return self._epoch(epoch).documents.slices(start, start + length)

    def read(self, index: int, slices: Sequence[DocumentSlice]) -> np.ndarray:
        """Read the tokens in ``slices``; see ``read_slices``."""
        return read_slices(self.token_file, index, slices)

    def _epoch(self, epoch_idx: int) -> _Epoch:
        epoch = self._epochs.get(epoch_idx)
        if epoch is None:
            while len(self._epochs) >= _MAX_CACHED_EPOCHS:
                del self._epochs[next(iter(self._epochs))]
            order = DocumentIndex(self.token_file, self.documents, seed=self.seed, epoch=epoch_idx, cache=self.cache)
            epoch = _Epoch(order, Permutation(self.per_epoch, "samples", self.seed, epoch_idx))
            self._epochs[epoch_idx] = epoch
        return epoch


def read_slices(source: TokenSource, index: int, slices: Sequence[DocumentSlice]) -> np.ndarray:
    """Read the concatenated tokens in ``slices`` as int64.

    Raises:
        SampleError: a slice cannot be read; the message names sample ``index``, the document and the file position.
    """
    tokens = np.empty(sum(doc_slice.length for doc_slice in slices), np.int64)
    filled = 0
    for document, offset, length in slices:
        try:
            tokens[filled : filled + length] = source.read(document, offset, length)
        except Exception as error:
            raise SampleError(
                f"sample {index} cannot be read: document {document}, tokens {offset}:{offset + length}, "
                f"{_describe_position(source, document, offset)}: {type(error).__name__}: {error}"
            ) from error
        filled += length
    return tokens


def prefetch_slices(source: TokenSource, slices: Sequence[DocumentSlice]) -> None:
    """Start to fetch ``slices`` for ``read_slices`` if the tokens of ``source`` are in an object store."""
    if isinstance(source, IndexedDataset):
        source.prefetch(slices)


def _describe_documents(documents: Documents) -> str:
    if isinstance(documents, np.ndarray):
        return f"{count_documents(documents)} documents of a split by hash"
    return f"documents {documents[0]}:{documents[1]}"


def _describe_position(source: TokenSource, document: int, offset: int) -> str:
    """Describe a token's file position for an error message."""
    if isinstance(source, IndexedDataset):
        return f"byte {source.byte_offset(document, offset)} of {source.token_path}"
    return source.prefix


# Index ranges, vectorized.


def concatenate_ranges(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Concatenate the ranges starts[i] ... starts[i] + lengths[i] - 1."""
    ends = lengths.cumsum()
    indices = (starts - ends + lengths).repeat(lengths)
    indices += np.arange(len(indices))
    return indices
