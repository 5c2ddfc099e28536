"""IndexedDataset: read documents in ``PREFIX.bin`` and ``PREFIX.idx``."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

import numpy as np

from megatron import object_store
from megatron.data import dataset_metadata, file_io, index_format
from megatron.data.cache import IndexCache
from megatron.data.document_table import read_table
from megatron.data.documents import DocumentSlice
from megatron.data.file_io import READERS, Reader
from megatron.data.range_cache import RangeCache, RangeReader
from megatron.errors import DataError

_SCAN_TOKENS = 1 << 22
_HASHED_FULLY_UP_TO_BYTES = 64 << 20
_NUM_PROBES = 256
_PROBE_BYTES = 1 << 16


class IndexedDataset:
    """Documents in a pair of token files, written by this project or by Megatron-LM.

    Attributes:
        document_lengths: tokens per document (int32). For a large file this array is an unaligned
            view of the mapped ``.idx``, so index it in blocks.
        sidecar: content of ``PREFIX.meta.json``; None if the file does not exist.

    Args:
        prefix: token file path without a suffix; may name an object store, such as s3://bucket/corpus.
        reader: "mmap", or "pread" for network file systems; the results are the same.
        cache: shares a large file's sizes between this host's processes if they cannot be mapped directly
            (with "pread", or if documents have several sequences). None: 4 bytes per document in each process. The
            cache also stores the data read from an object store.

    Raises:
        DataError: a file is missing or damaged, or the files do not belong together.
    """

    def __init__(self, prefix: str | Path, *, reader: str = "mmap", cache: IndexCache | None = None) -> None:
        if reader not in READERS:
            raise ValueError(f"reader must be one of {', '.join(READERS)}, got {reader!r}")
        self.prefix = _strip_suffix(str(prefix))
        self.is_remote = object_store.is_remote(self.prefix)
        self.token_path: Path | str = self.prefix + ".bin"
        if self.is_remote:
            ranges = (cache or IndexCache()).ranges
            self.index_path, sidecar_path = self._fetch_index_files(ranges)
        else:
            self.index_path, self.token_path = Path(self.prefix + ".idx"), Path(self.token_path)
            file_io.roll_forward(self.prefix)
            self._check_present([path for path in (self.index_path, self.token_path) if not path.is_file()])
            sidecar_path = Path(self.prefix + ".meta.json")
        self.sidecar = dataset_metadata.read(sidecar_path)
        self._table = read_table(self.index_path, reader=reader, cache=cache, has_metadata=self.sidecar is not None)
        self.document_lengths, self.dtype = self._table.document_lengths, self._table.dtype
        self.num_documents, self.num_tokens = len(self.document_lengths), self._table.num_tokens
        if self.sidecar:
            dataset_metadata.check_matches_files(
                self.sidecar,
                sidecar_path,
                num_documents=self.num_documents,
                num_tokens=self.num_tokens,
                idx_crc32=self._table.idx_crc32,
            )
        self._check_file_size()
        self._file: Reader | RangeReader
        if isinstance(self.token_path, Path):
            self._file = READERS[reader](self.token_path)
        else:
            self._file = RangeReader(self.token_path, ranges)

    def read(self, document: int, offset: int = 0, length: int | None = None) -> np.ndarray:
        """Copy ``length`` tokens of ``document``, starting at ``offset`` (None: up to the document's end)."""
        size = int(self.document_lengths[document])
        length = size - offset if length is None else length
        if offset < 0 or length < 0 or offset + length > size:
            raise DataError(
                f"{self.prefix}: tokens {offset}:{offset + length} of document {document}, which has only {size}"
            )
        return self.read_tokens(self._table.start(document) + offset, length)

    def read_tokens(self, start: int, count: int) -> np.ndarray:
        """Copy ``count`` tokens, starting at token ``start`` of the file, across document boundaries."""
        width = self.dtype.itemsize
        return self._file.read(start * width, count * width).view(self.dtype)

    def prefetch(self, slices: Sequence[DocumentSlice]) -> None:
        """Start to fetch the tokens of ``slices`` if the token file is in an object store."""
        if isinstance(self._file, RangeReader):
            width = self.dtype.itemsize
            self._file.prefetch(
                [
                    (self.byte_offset(doc_slice.document, doc_slice.offset), doc_slice.length * width)
                    for doc_slice in slices
                ]
            )

    @cached_property
    def num_sequences(self) -> int:
        """Sequence count; more than the document count if documents consist of several sentences."""
        with open(self.index_path, "rb") as file:
            header_bytes = file.read(index_format.HEADER.size)
        return index_format.decode_header(header_bytes, self.index_path.stat().st_size, self.index_path).num_sequences

    @property
    def mtime_ns(self) -> int:
        """Modification time of the token file in nanoseconds."""
        return object_store.status(self.token_path).time_ns

    @cached_property
    def starts(self) -> np.ndarray:
        """int64[num_documents + 1], each document's start and the last one's end; not for large files."""
        return self.starts_of(0, self.num_documents)

    def starts_of(self, first: int, stop: int) -> np.ndarray:
        """Compute int64[stop - first + 1], the starts of documents first ... stop - 1 and the last one's end."""
        return self._table.starts_of(first, stop)

    def byte_offset(self, document: int, offset: int = 0) -> int:
        """Compute the byte offset in the ``.bin`` for token ``offset`` in ``document``."""
        return (self._table.start(document) + offset) * self.dtype.itemsize

    @property
    def max_token_id(self) -> int | None:
        """Largest token id according to the sidecar; None without a sidecar."""
        return self.sidecar.max_token_id if self.sidecar else None

    @property
    def has_eod(self) -> bool | None:
        """True if each document ends with an end-of-document token; None without a sidecar."""
        return self.sidecar.has_eod if self.sidecar else None

    def find_invalid_id(self, vocab_size: int) -> tuple[int, int, int] | None:
        """Find the first token id outside 0 ... vocab_size - 1: (document, offset, id), or None if all are valid."""
        for start in range(0, self.num_tokens, _SCAN_TOKENS):
            block = self.read_tokens(start, min(_SCAN_TOKENS, self.num_tokens - start))
            if int(block.max()) < vocab_size and int(block.min()) >= 0:
                continue
            position = int(np.flatnonzero((block >= vocab_size) | (block < 0))[0])
            document = self._table.find_document(start + position)
            return document, start + position - self._table.start(document), int(block[position])
        return None

    @cached_property
    def fingerprint(self) -> str:
        """Short digest of the tokens.

        It covers the ``.idx`` (for a large file only the lengths) and the ``.bin`` (for a large file only evenly spaced
        blocks).
        """
        digest = hashlib.sha256(f"{self.dtype.name}:{self.num_tokens}:{self._table.key}".encode())
        num_bytes = self.num_tokens * self.dtype.itemsize
        if num_bytes <= _HASHED_FULLY_UP_TO_BYTES:
            digest.update(self._file.read(0, num_bytes).data)
        else:
            starts = np.linspace(0, num_bytes - _PROBE_BYTES, _NUM_PROBES).astype(np.int64).tolist()
            if isinstance(self._file, RangeReader):
                for start in starts:
                    self._file.prefetch([(start, _PROBE_BYTES)])
            for start in starts:
                digest.update(self._file.read(start, _PROBE_BYTES).data)
        return digest.hexdigest()[:16]

    def _fetch_index_files(self, ranges: RangeCache) -> tuple[Path, Path]:
        """Fetch local copies of the ``.idx`` and the sidecar; without a sidecar, the second path does not exist."""
        names = [self.prefix + suffix for suffix in (".idx", ".bin", ".meta.json")]
        are_present = [object_store.size_of(name) is not None for name in names]
        self._check_present(
            [name for name, is_present in zip(names[:2], are_present[:2], strict=True) if not is_present]
        )
        index_path = ranges.fetch_object(names[0])
        return index_path, ranges.fetch_object(names[2]) if are_present[2] else index_path.with_name("no sidecar")

    def _check_present(self, missing: Sequence[Path | str]) -> None:
        for path in missing:
            name = self.prefix.rpartition("/")[2]
            raise DataError(
                f"{path} does not exist; token files {self.prefix} are {name}.idx and {name}.bin. Build them: python "
                "tools/preprocess_data.py --input CORPUS.jsonl --tokenizer-path TOKENIZER.json --output-prefix "
                f"{self.prefix}"
            )

    def _check_file_size(self) -> None:
        expected, actual = self.num_tokens * self.dtype.itemsize, object_store.status(self.token_path).size
        if expected != actual:
            raise DataError(
                f"{self.token_path} must have {expected} bytes ({self.num_tokens} tokens of {self.dtype.itemsize} "
                f"bytes according to {self.index_path.name}), but has {actual}. "
                "It was truncated or belongs to another .idx. Build both again."
            )


def _strip_suffix(prefix: str) -> str:
    for suffix in (".bin", ".idx"):
        prefix = prefix.removesuffix(suffix)
    return prefix
