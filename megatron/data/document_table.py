"""DocumentTable: number of tokens of each document of a token file, and its start.

An ``.idx`` of some million sequences is read whole and checked through. Of a larger one only the lengths are read
through, as they alone decide where a document lies; they are then used where they are, in the mapped file. The rest
of it follows from them, and is compared at some thousand places.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megatron.data import index_format, large_index
from megatron.data.cache import IndexCache

LARGE = 1 << 22
"""Sequences from which on an ``.idx`` counts as large: 80 MB."""


@dataclass(frozen=True)
class DocumentTable:
    """What an ``.idx`` says.

    ``starts`` is the first token of every ``stride``-th document, and at the end the number of all tokens. ``sizes``
    may lie unaligned in a mapped file (``documents.sizes_of`` takes from it). ``key`` changes when a size does.
    """

    dtype: np.dtype
    sizes: np.ndarray
    starts: np.ndarray
    stride: int
    key: str
    idx_crc32: int | None

    @property
    def num_tokens(self) -> int:
        return int(self.starts[-1])

    def start(self, document: int) -> int:
        """Return the first token of ``document``, counted from the beginning of the file."""
        block, rest = divmod(document, self.stride)
        start = int(self.starts[block])
        return start + int(self.sizes[document - rest : document].sum(dtype=np.int64)) if rest else start

    def starts_of(self, first: int, stop: int) -> np.ndarray:
        """Return int64[stop - first + 1], where documents first ... stop - 1 start and where the last one ends."""
        starts = np.empty(stop - first + 1, np.int64)
        starts[0] = self.start(first)
        np.cumsum(self.sizes[first:stop], out=starts[1:])
        starts[1:] += starts[0]
        return starts

    def find(self, token: int) -> int:
        """Return the document that holds ``token``."""
        first = (int(np.searchsorted(self.starts, token, "right")) - 1) * self.stride
        starts = self.starts_of(first, min(first + self.stride, len(self.sizes)))
        return first + int(np.searchsorted(starts, token, "right")) - 1


def read_table(path: Path, *, reader: str, cache: IndexCache | None, has_metadata: bool) -> DocumentTable:
    """Return the table of the ``.idx`` at ``path``.

    Args:
        reader: "mmap" or "pread".
        cache: where a large file's sizes are kept if they cannot be mapped as they are; None: in memory.
        is_told: a sidecar says that our own writer made the file, one sequence for each document.

    Raises:
        DataError: not such a file, damaged, or of a kind that cannot be read.
    """
    with open(path, "rb") as file:
        opening = file.read(index_format.HEADER.size)
    header = index_format.decode_header(opening, path.stat().st_size, path)
    if header.num_sequences >= LARGE:
        index = large_index.LargeIndex(path, header, reader=reader, cache=cache, has_metadata=has_metadata)
        key = f"{len(index.sizes)} sizes {index.crc32:08x}"
        return DocumentTable(header.dtype, index.sizes, index.starts, large_index.STRIDE, key, None)
    data = path.read_bytes()
    sizes, dtype = index_format.decode_index(data, path)
    starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes, dtype=np.int64)])
    crc32 = zlib.crc32(data)
    return DocumentTable(dtype, sizes, starts, 1, str(crc32), crc32)
