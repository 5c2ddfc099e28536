"""DocumentTable: document sizes and starts in a token file.

An ``.idx`` of up to 4 million sequences is loaded and checked completely. If it is larger, only the lengths are
scanned completely, because they determine the starts of the documents; afterwards, the lengths are accessed in a mapped
file. The other arrays follow from the lengths and are checked at a few thousand positions.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megatron.data import index_format, large_index
from megatron.data.cache import IndexCache

LARGE_FROM_SEQUENCES = 1 << 22
"""Number of sequences from which an ``.idx`` is treated as large (80 MB)."""


@dataclass(frozen=True)
class DocumentTable:
    """Content of an ``.idx``.

    Args:
        document_lengths: tokens per document; may be an unaligned view of a mapped file (use
            ``documents.gather_lengths``).
        starts: first token of every ``stride``-th document, followed by the total token count.
        key: digest of the sizes.
        idx_crc32: file checksum; None for a large file.
    """

    dtype: np.dtype
    document_lengths: np.ndarray
    starts: np.ndarray
    stride: int
    key: str
    idx_crc32: int | None

    @property
    def num_tokens(self) -> int:
        return int(self.starts[-1])

    def start(self, document: int) -> int:
        """Look up the index in the file of the first token in ``document``."""
        block, remainder = divmod(document, self.stride)
        start = int(self.starts[block])
        return (
            start + int(self.document_lengths[document - remainder : document].sum(dtype=np.int64))
            if remainder
            else start
        )

    def starts_of(self, first: int, stop: int) -> np.ndarray:
        """Compute int64[stop - first + 1], the starts of documents first ... stop - 1 and the last one's end."""
        starts = np.empty(stop - first + 1, np.int64)
        starts[0] = self.start(first)
        np.cumsum(self.document_lengths[first:stop], out=starts[1:])
        starts[1:] += starts[0]
        return starts

    def find_document(self, token: int) -> int:
        """Find the document that contains token ``token`` of the file."""
        first = (int(np.searchsorted(self.starts, token, "right")) - 1) * self.stride
        starts = self.starts_of(first, min(first + self.stride, len(self.document_lengths)))
        return first + int(np.searchsorted(starts, token, "right")) - 1


def read_table(path: Path, *, reader: str, cache: IndexCache | None, has_metadata: bool) -> DocumentTable:
    """Read the table of the ``.idx`` at ``path``.

    Args:
        reader: "mmap" or "pread".
        cache: stores a large file's sizes if they cannot be mapped directly; None: they are stored in memory.
        has_metadata: the file has a sidecar, so it was written by this project with one sequence per document.

    Raises:
        DataError: the file is not an index, is damaged, or has an unsupported format.
    """
    with open(path, "rb") as file:
        header_bytes = file.read(index_format.HEADER.size)
    header = index_format.decode_header(header_bytes, path.stat().st_size, path)
    if header.num_sequences >= LARGE_FROM_SEQUENCES:
        index = large_index.LargeIndex(path, header, reader=reader, cache=cache, has_metadata=has_metadata)
        key = f"{len(index.document_lengths)} sizes {index.crc32:08x}"
        return DocumentTable(header.dtype, index.document_lengths, index.starts, large_index.STRIDE, key, None)
    data = path.read_bytes()
    document_lengths, dtype = index_format.decode_index(data, path)
    starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(document_lengths, dtype=np.int64)])
    crc32 = zlib.crc32(data)
    return DocumentTable(dtype, document_lengths, starts, 1, str(crc32), crc32)
