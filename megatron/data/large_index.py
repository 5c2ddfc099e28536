"""LargeIndex: an ``.idx`` file that is too large to load in each process and is accessed in place.

| file part | check |
|---|---|
| header, file size | complete |
| lengths | all, in blocks: not negative, and their sum must match the ``.bin``; the fingerprint contains their crc32 |
| byte offsets | the first, the last and a few thousand others; they are not used for reading |
| document starts | like the byte offsets if a sidecar shows that this project wrote the file, otherwise all |

Blocks are read by ``pread``, because the pages of a mapping would stay resident in the process.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np

from megatron.data.cache import IndexCache
from megatron.data.file_io import FileBinReader, MMapBinReader
from megatron.data.index_format import (
    HEADER,
    Header,
    check_lengths,
    has_no_documents,
    lengths_from_bounds,
    offsets_error,
    starts_error,
)

STRIDE = 256
NUM_PROBES = 4096
_BLOCK = 1 << 20
_DOCUMENTS_PER_BLOCK = 1 << 16


class LargeIndex:
    """Content of a large ``.idx``.

    Attributes:
        document_lengths: tokens per document.
        starts: first token of every ``STRIDE``-th document, followed by the total token count.
        crc32: checksum of the sizes.

    Raises:
        DataError: one of the checks in the table above fails.
    """

    def __init__(
        self, path: Path, header: Header, *, reader: str, cache: IndexCache | None, has_metadata: bool
    ) -> None:
        self._path, self._header, self._cache = path, header, cache
        self._file = FileBinReader(path)
        self.starts, self.crc32 = self._scan_lengths(self._read_sequence_lengths())
        self._check_offsets()
        if not self._has_one_sequence_per_document(has_metadata):
            self.document_lengths = self._cache_lengths("joined", self._join_sequences)
            self.starts, self.crc32 = self._scan_lengths(
                self.document_lengths[i : i + _BLOCK] for i in range(0, len(self.document_lengths), _BLOCK)
            )
        elif reader == "pread":
            self.document_lengths = self._cache_lengths("lengths", self._read_sequence_lengths)
        else:
            mapped = MMapBinReader(path).bytes
            self.document_lengths = np.ndarray(header.num_sequences, "<i4", mapped, HEADER.size)

    def _read_array(self, array_offset: int, dtype: str, first: int, count: int) -> np.ndarray:
        """Read ``count`` elements, from index ``first`` on, in the array at byte ``array_offset``."""
        width = np.dtype(dtype).itemsize
        return self._file.read(array_offset + first * width, count * width).view(dtype)

    def _read_sequence_lengths(self) -> Iterator[np.ndarray]:
        """Read all sequence lengths in blocks."""
        count = self._header.num_sequences
        for first in range(0, count, _BLOCK):
            yield self._read_array(HEADER.size, "<i4", first, min(_BLOCK, count - first))

    def _scan_lengths(self, blocks: Iterable[np.ndarray]) -> tuple[np.ndarray, int]:
        """Compute (cumulative tokens before every ``STRIDE``-th document and in total, crc32 over the sizes)."""
        stride_tokens, crc32, first = [np.zeros(1, np.int64)], 0, 0
        for block in blocks:
            check_lengths(block, first, self._path)
            stride_tokens.append(np.add.reduceat(block, np.arange(0, len(block), STRIDE), dtype=np.int64))
            crc32 = zlib.crc32(block.data, crc32)
            first += len(block)
        return np.cumsum(np.concatenate(stride_tokens)), crc32

    def _check_offsets(self) -> None:
        count, width = self._header.num_sequences, self._header.dtype.itemsize
        last = int(self._read_array(HEADER.size, "<i4", count - 1, 1)[0])
        expected = {count - 1: int(self.starts[-1]) - last}
        for block in _evenly_spaced(-(-count // STRIDE)):
            expected[block * STRIDE] = int(self.starts[block])
        for sequence, start in expected.items():
            if int(self._read_array(self._header.offsets_at, "<i8", sequence, 1)[0]) != start * width:
                raise offsets_error(self._path)

    def _has_one_sequence_per_document(self, has_metadata: bool) -> bool:
        """Check if each sequence is a document."""
        count, starts_at = self._header.num_starts, self._header.starts_at
        if has_no_documents(self._read_array(starts_at, "<i8", 0, min(count, 2))):
            return True
        if count != self._header.num_sequences + 1:
            return False
        if not has_metadata:
            blocks = (
                (first, self._read_array(starts_at, "<i8", first, min(_BLOCK, count - first)))
                for first in _block_starts(count)
            )
            return all(np.array_equal(block, np.arange(first, first + len(block))) for first, block in blocks)
        if any(int(self._read_array(starts_at, "<i8", idx, 1)[0]) != idx for idx in _evenly_spaced(count)):
            raise starts_error(self._header.num_sequences, self._path)
        return True

    def _join_sequences(self) -> Iterator[np.ndarray]:
        """Yield document sizes in blocks, for documents that consist of several sequences (sentences)."""
        num_documents, num_sequences = self._header.num_starts - 1, self._header.num_sequences
        starts_at, error = self._header.starts_at, starts_error(self._header.num_sequences, self._path)
        if num_documents < 1 or int(self._read_array(starts_at, "<i8", 0, 1)[0]) != 0:
            raise error
        for first in range(0, num_documents, _DOCUMENTS_PER_BLOCK):
            starts = self._read_array(starts_at, "<i8", first, min(_DOCUMENTS_PER_BLOCK, num_documents - first) + 1)
            if (np.diff(starts) < 0).any() or starts[0] < 0 or starts[-1] > num_sequences:
                raise error
            lengths = self._read_array(HEADER.size, "<i4", int(starts[0]), int(starts[-1] - starts[0]))
            ends = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)])
            yield lengths_from_bounds(ends[starts - starts[0]], first, self._path)
        if starts[-1] != num_sequences:
            raise error

    def _cache_lengths(self, array_name: str, blocks: Callable[[], Iterator[np.ndarray]]) -> np.ndarray:
        """Concatenate the blocks, in a cache file if there is a cache, else in memory."""
        if self._cache is None:
            return np.concatenate(list(blocks()))
        status = self._path.stat()
        key = repr((array_name, str(self._path.resolve()), status.st_size, status.st_mtime_ns, self.crc32))
        name = f"sizes-{hashlib.sha256(key.encode()).hexdigest()[:16]}"
        return self._cache.arrays(name, 1, lambda _: blocks())[0]


def _block_starts(count: int) -> range:
    """List each block's first index in an array with ``count`` elements."""
    return range(0, count, _BLOCK)


def _evenly_spaced(count: int) -> list[int]:
    """Space integers evenly from 0 to ``count - 1``."""
    return sorted(set(np.linspace(0, count - 1, min(count, NUM_PROBES)).astype(np.int64).tolist()))
