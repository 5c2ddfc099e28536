"""IndexedDataset: .bin/.idx, documents and their starts."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np

from megatron import object_store
from megatron.data import file_io, index_format
from megatron.data.cache import IndexCache
from megatron.data.file_io import READERS, Reader
from megatron.data.range_cache import RangeCache, RangeReader
from megatron.errors import DataError

# How many tokens each document of a token file has, and where it starts.
#
# An ``.idx`` of some million sequences is read whole and checked through. Of a larger one only the lengths are read
# through, as they alone decide where a document lies; they are then used where they are, in the mapped file. The rest
# of it follows from them, and is compared at some thousand places.

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
        index = index_format.LargeIndex(path, header, reader=reader, cache=cache, has_metadata=has_metadata)
        key = f"{len(index.sizes)} sizes {index.crc32:08x}"
        return DocumentTable(header.dtype, index.sizes, index.starts, index_format.STRIDE, key, None)
    data = path.read_bytes()
    sizes, dtype = index_format.decode_index(data, path)
    starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes, dtype=np.int64)])
    crc32 = zlib.crc32(data)
    return DocumentTable(dtype, sizes, starts, 1, str(crc32), crc32)


# Reading a pair of token files: ``PREFIX.idx`` and ``PREFIX.bin``, mapped or by ``pread``.

_SCAN_TOKENS = 1 << 22
_WHOLE_BELOW_BYTES = 64 << 20
_NUM_PROBES = 256
_PROBE_BYTES = 1 << 16


class IndexedDataset:
    """The documents of one pair of token files; ours and Megatron's.

    ``sizes`` is the number of tokens of each document (int32); in a large file it lies unaligned in the mapped
    ``.idx``, so index it in blocks. ``sidecar`` is None for files that have none.

    Args:
        reader: "mmap", or "pread" for network file systems: the same results.
        cache: where the sizes of a large file are shared by the processes of this host if they cannot be mapped as they
            are: with "pread", and where documents have several sequences. None: 4 bytes a document in each process.
            It also keeps what is read from an object store, which a ``prefix`` such as s3://bucket/corpus names.

    Raises:
        DataError: a file is missing, damaged, or the two do not belong together.
    """

    def __init__(self, prefix: str | Path, *, reader: str = "mmap", cache: IndexCache | None = None) -> None:
        if reader not in READERS:
            raise ValueError(f"reader must be one of {', '.join(READERS)}, got {reader!r}")
        self.prefix = _without_suffix(str(prefix))
        self.is_remote = object_store.is_remote(self.prefix)
        self.token_path: Path | str = self.prefix + ".bin"
        if self.is_remote:
            ranges = (cache or IndexCache()).ranges
            self.index_path, sidecar_path = self._fetched(ranges)
        else:
            self.index_path, self.token_path = Path(self.prefix + ".idx"), Path(self.token_path)
            file_io.roll_forward(self.prefix)
            self._check_present([path for path in (self.index_path, self.token_path) if not path.is_file()])
            sidecar_path = Path(self.prefix + ".meta.json")
        self.sidecar = index_format.read(sidecar_path)
        self._table = read_table(self.index_path, reader=reader, cache=cache, has_metadata=self.sidecar is not None)
        self.sizes, self.dtype = self._table.sizes, self._table.dtype
        self.num_documents, self.num_tokens = len(self.sizes), self._table.num_tokens
        if self.sidecar:
            index_format.check_belongs(
                self.sidecar,
                sidecar_path,
                num_documents=self.num_documents,
                num_tokens=self.num_tokens,
                idx_crc32=self._table.idx_crc32,
            )
        self._check_bytes()
        self._file: Reader | RangeReader
        if isinstance(self.token_path, Path):
            self._file = READERS[reader](self.token_path)
        else:
            self._file = RangeReader(self.token_path, ranges)

    def read(self, document: int, offset: int = 0, length: int | None = None) -> np.ndarray:
        """Return a copy of ``length`` tokens of ``document`` from ``offset`` on (all that follow if None)."""
        size = int(self.sizes[document])
        length = size - offset if length is None else length
        if offset < 0 or length < 0 or offset + length > size:
            raise DataError(
                f"{self.prefix}: tokens {offset}:{offset + length} of document {document}, which has {size}"
            )
        return self.read_tokens(self._table.start(document) + offset, length)

    def read_tokens(self, start: int, count: int) -> np.ndarray:
        """Return a copy of ``count`` tokens from number ``start`` of the whole file on, across documents."""
        width = self.dtype.itemsize
        return self._file.read(start * width, count * width).view(self.dtype)

    def prefetch(self, pieces: Sequence[Piece]) -> None:
        """Have tokens fetched that ``read`` will be asked for, where they lie in an object store."""
        if isinstance(self._file, RangeReader):
            width = self.dtype.itemsize
            self._file.prefetch(
                [(self.byte_offset(piece.document, piece.offset), piece.length * width) for piece in pieces]
            )

    @property
    def changed_ns(self) -> int:
        """When the tokens were written last."""
        return object_store.status(self.token_path).time_ns

    @cached_property
    def starts(self) -> np.ndarray:
        """int64[num_documents + 1], where each document starts and the last one ends: not for large files."""
        return self.starts_of(0, self.num_documents)

    def starts_of(self, first: int, stop: int) -> np.ndarray:
        """Return int64[stop - first + 1], where documents first ... stop - 1 start and where the last one ends."""
        return self._table.starts_of(first, stop)

    def byte_offset(self, document: int, offset: int = 0) -> int:
        """Return where in the ``.bin`` a token lies."""
        return (self._table.start(document) + offset) * self.dtype.itemsize

    @property
    def max_token_id(self) -> int | None:
        """The largest token id where a sidecar tells it, else None."""
        return self.sidecar.max_token_id if self.sidecar else None

    @property
    def has_eod(self) -> bool | None:
        """Whether each document ends with an end-of-document token; None where no sidecar tells it."""
        return self.sidecar.has_eod if self.sidecar else None

    def first_outside(self, vocab_size: int) -> tuple[int, int, int] | None:
        """Return (document, offset, id) of the first token id that is not in 0 ... vocab_size - 1, reading all."""
        for start in range(0, self.num_tokens, _SCAN_TOKENS):
            block = self.read_tokens(start, min(_SCAN_TOKENS, self.num_tokens - start))
            if int(block.max()) < vocab_size and int(block.min()) >= 0:
                continue
            place = int(np.flatnonzero((block >= vocab_size) | (block < 0))[0])
            document = self._table.find(start + place)
            return document, start + place - self._table.start(document), int(block[place])
        return None

    @cached_property
    def fingerprint(self) -> str:
        """A short text that changes when the tokens do.

        It covers the ``.idx`` (of a large one all lengths), and all of a small ``.bin``, evenly spaced parts of a large
        one.
        """
        digest = hashlib.sha256(f"{self.dtype.name}:{self.num_tokens}:{self._table.key}".encode())
        num_bytes = self.num_tokens * self.dtype.itemsize
        if num_bytes <= _WHOLE_BELOW_BYTES:
            digest.update(self._file.read(0, num_bytes).data)
        else:
            starts = np.linspace(0, num_bytes - _PROBE_BYTES, _NUM_PROBES).astype(np.int64).tolist()
            if isinstance(self._file, RangeReader):
                for start in starts:
                    self._file.prefetch([(start, _PROBE_BYTES)])
            for start in starts:
                digest.update(self._file.read(start, _PROBE_BYTES).data)
        return digest.hexdigest()[:16]

    def _fetched(self, ranges: RangeCache) -> tuple[Path, Path]:
        """Return the copies of the ``.idx`` and of the sidecar, which is missing where the store has none."""
        names = [self.prefix + suffix for suffix in (".idx", ".bin", ".meta.json")]
        is_there = [object_store.size_of(name) is not None for name in names]
        self._check_present([name for name, found in zip(names[:2], is_there[:2], strict=True) if not found])
        index = ranges.whole(names[0])
        return index, ranges.whole(names[2]) if is_there[2] else index.with_name("no sidecar")

    def _check_present(self, missing: Sequence[Path | str]) -> None:
        for path in missing:
            name = self.prefix.rpartition("/")[2]
            raise DataError(
                f"{path} does not exist; token files {self.prefix} are {name}.idx and {name}.bin. Build them: python "
                "tools/preprocess_data.py --input CORPUS.jsonl --tokenizer-path TOKENIZER.json --output-prefix "
                f"{self.prefix}"
            )

    def _check_bytes(self) -> None:
        expected, found = self.num_tokens * self.dtype.itemsize, object_store.status(self.token_path).size
        if expected != found:
            raise DataError(
                f"{self.token_path} must have {expected} bytes ({self.num_tokens} tokens of {self.dtype.itemsize} "
                f"bytes by {self.index_path.name}), it has {found}. "
                "It was cut short or belongs to another .idx: build both again."
            )


def _without_suffix(prefix: str) -> str:
    for suffix in (".bin", ".idx"):
        prefix = prefix.removesuffix(suffix)
    return prefix


# Which documents of a token file a split takes, and sums over them that fit a small memory for any number of them.

Documents = tuple[int, int] | np.ndarray
"""(start, stop), or ascending document numbers (int32 or int64), as a split by hash gives them."""

_BLOCK = 1 << 18


def count_of(documents: Documents) -> int:
    """Return how many documents these are."""
    return len(documents) if isinstance(documents, np.ndarray) else documents[1] - documents[0]


def number_type(documents: Documents) -> type[np.signedinteger]:
    """Return the type that holds the number of each of ``documents``: int32 while that does."""
    if isinstance(documents, np.ndarray):
        last = int(documents[-1]) if len(documents) else 0
    else:
        last = documents[1] - 1
    return np.int32 if last < 1 << 31 else np.int64


def numbers_at(documents: Documents, places: np.ndarray) -> np.ndarray:
    """Return the document numbers at ``places`` (counted from 0) of ``documents``."""
    return documents[places] if isinstance(documents, np.ndarray) else places + documents[0]


def sizes_of(sizes: np.ndarray, numbers: np.ndarray) -> np.ndarray:
    """Return ``sizes[numbers]``, fast also where ``sizes`` lies unaligned in a mapped file.

    There numpy would copy all of an array before it takes from it; as raw bytes of the same width nothing is unaligned.
    """
    if sizes.flags.aligned:
        return sizes.take(numbers)
    return sizes.view(f"V{sizes.itemsize}").take(numbers).view(sizes.dtype)


def num_tokens_of(sizes: np.ndarray, documents: Documents) -> int:
    """Return how many tokens ``documents`` hold; ``sizes`` are those of all documents of the file."""
    if not isinstance(documents, np.ndarray):
        return int(sizes[documents[0] : documents[1]].sum(dtype=np.int64))
    return sum(int(sizes_of(sizes, block).sum(dtype=np.int64)) for block in _blocks(documents))


def longest_of(sizes: np.ndarray, documents: Documents) -> int:
    """Return how many tokens the longest of ``documents`` holds."""
    if not isinstance(documents, np.ndarray):
        return int(sizes[documents[0] : documents[1]].max())
    return max(int(sizes_of(sizes, block).max()) for block in _blocks(documents))


def _blocks(numbers: np.ndarray) -> Iterator[np.ndarray]:
    return (numbers[begin : begin + _BLOCK] for begin in range(0, len(numbers), _BLOCK))


def documents_key(documents: Documents) -> str:
    """Return a text that tells these documents from others: that of the range, or a hash of all numbers.

    It is part of the fingerprints that checkpoints hold, so it must never change. int32 and int64 give the same.
    """
    if not isinstance(documents, np.ndarray):
        return str((int(documents[0]), int(documents[1])))
    digest = hashlib.sha256()
    for begin in range(0, len(documents), _BLOCK):
        digest.update(documents[begin : begin + _BLOCK].astype("<i8").tobytes())
    return f"{len(documents)} documents {digest.hexdigest()[:16]}"


# What samples are cut from: documents of tokens, and pieces of them.


class TokenSource(Protocol):
    """Documents of tokens: a ``IndexedDataset``, or what can stand in for one."""

    @property
    def prefix(self) -> str: ...

    @property
    def sizes(self) -> np.ndarray: ...

    @property
    def fingerprint(self) -> str: ...

    def read(self, document: int, offset: int = 0, length: int | None = None) -> np.ndarray: ...


class Piece(NamedTuple):
    """What a window holds of one document."""

    document: int
    offset: int
    length: int
