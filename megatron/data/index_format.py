"""Formats of .idx (read, written, read in part where it is too large) and .meta.json."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from megatron.data.cache import IndexCache
from megatron.data.file_io import FileBinReader, MMapBinReader
from megatron.errors import DataError

# The ``.idx`` file: how many tokens each document of the ``.bin`` beside it holds.
#
# | offset | type | content |
# |---|---|---|
# | 0 | 9 bytes | ``MMIDIDX`` and two zeros |
# | 9 | u64 | version, 1 |
# | 17 | u8 | code of the token type |
# | 18, 26 | u64, u64 | S sequences; D = documents + 1 |
# | 34 | int32[S], int64[S], int64[D] | lengths in tokens; byte offsets into .bin; first sequence of each document |
#
# Little-endian throughout. The ``.bin`` is the tokens alone. Readers of Megatron-LM of any age open these files, and
# this one opens what its writers of 2020 and of today make. Tools that know no documents, as CPM's, leave one document
# start, 0: each sequence then is a document. Megatron's multimodal sets have int8[S] more at the end, and are refused.

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
TOKEN_TYPES: dict[int, type[np.generic]] = {
    1: np.uint8,
    2: np.int8,
    3: np.int16,
    4: np.int32,
    5: np.int64,
    8: np.uint16,
}
"""Codes 6 and 7 are left out: their meaning changed over the years, so nobody can know what such a file holds."""

U16_BELOW_VOCAB_SIZE = 65_500
_LAZY_MAGIC = b"TNTIDX\x00\x00"


class Header(NamedTuple):
    """What the first bytes of an ``.idx`` say, and where its three arrays begin."""

    dtype: np.dtype
    num_sequences: int
    num_starts: int

    @property
    def offsets_at(self) -> int:
        return HEADER.size + 4 * self.num_sequences

    @property
    def starts_at(self) -> int:
        return HEADER.size + 12 * self.num_sequences

    @property
    def num_bytes(self) -> int:
        return HEADER.size + 12 * self.num_sequences + 8 * self.num_starts


def token_type(vocab_size: int) -> np.dtype:
    """Return the type that tokens of a vocabulary of this size are stored in."""
    return np.dtype(np.uint16 if vocab_size < U16_BELOW_VOCAB_SIZE else np.int32)


def decode_header(opening: bytes, file_bytes: int, path: Path) -> Header:
    """Return the header of an ``.idx`` of ``file_bytes`` bytes that starts with ``opening``.

    Raises:
        DataError: not such a file, of a kind that cannot be read, or of another size than its counts need. Nothing is
            allocated by counts that the file claims before they are seen to fit its size.
    """
    if file_bytes < HEADER.size:
        raise DataError(
            f"{path}: an index has at least {HEADER.size} bytes, this file has {file_bytes}. Build it again."
        )
    magic, version, code, num_sequences, num_starts = HEADER.unpack_from(opening)
    _check_kind(magic, version, code, path)
    header = Header(np.dtype(TOKEN_TYPES[code]), num_sequences, num_starts)
    if file_bytes == header.num_bytes + num_sequences and num_sequences:
        raise DataError(
            f"{path}: the file has {file_bytes} bytes, {num_sequences} more than {num_sequences} sequences and "
            f"{num_starts} document starts need: one byte for each sequence, as Megatron-LM's multimodal sets have "
            "them. Such sets cannot be read; build one of text alone."
        )
    if file_bytes != header.num_bytes:
        raise DataError(
            f"{path}: {num_sequences} sequences and {num_starts} document starts need {header.num_bytes} bytes, the "
            f"file has {file_bytes}. It was cut short or damaged: build it again with tools/preprocess_data.py."
        )
    return header


def decode_index(data: bytes, path: Path) -> tuple[np.ndarray, np.dtype]:
    """Return (tokens of each document as int32, token type) from the bytes of an ``.idx``.

    Raises:
        DataError: as ``decode_header``, or its three arrays disagree.
    """
    header = decode_header(data[: HEADER.size], len(data), path)
    # The arrays lie unaligned in the file; one aligned copy makes every later search some thousand times faster.
    lengths = np.frombuffer(data, "<i4", header.num_sequences, HEADER.size).astype(np.int32)
    offsets = np.frombuffer(data, "<i8", header.num_sequences, header.offsets_at)
    starts = np.frombuffer(data, "<i8", header.num_starts, header.starts_at).astype(np.int64)
    ends = np.cumsum(lengths, dtype=np.int64)
    check_lengths(lengths, 0, path)
    if not np.array_equal(offsets, (ends - lengths) * header.dtype.itemsize):
        raise offsets_error(path)
    if has_no_documents(starts):
        return lengths, header.dtype
    if len(starts) == 0 or starts[0] != 0 or starts[-1] != len(lengths) or (np.diff(starts) < 0).any():
        raise starts_error(len(lengths), path)
    return _document_sizes(starts, ends, lengths, path), header.dtype


def has_no_documents(starts: np.ndarray) -> bool:
    """Whether these document starts are those of a tool that knows no documents."""
    return len(starts) == 1 and starts[0] == 0


def check_lengths(lengths: np.ndarray, first: int, path: Path) -> None:
    """No length, the first of which is that of sequence ``first``, may be negative."""
    if len(lengths) and lengths.min() < 0:
        worst = int(np.flatnonzero(lengths < 0)[0])
        raise DataError(
            f"{path}: lengths must not be negative, sequence {first + worst} has {lengths[worst]}. Build it again."
        )


def offsets_error(path: Path) -> DataError:
    """Return the error of an index whose second array is wrong."""
    return DataError(f"{path}: byte offsets do not follow from the lengths; the file is damaged. Build it again.")


def starts_error(num_sequences: int, path: Path) -> DataError:
    """Return the error of an index whose third array is wrong."""
    return DataError(
        f"{path}: document starts must rise from 0 to {num_sequences} sequences; the file is damaged. Build it again."
    )


def joined_sizes(bounds: np.ndarray, first: int, path: Path) -> np.ndarray:
    """Return the tokens of each document as int32, from where each begins and ends; the first is document ``first``."""
    sizes = np.diff(bounds)
    if len(sizes) and sizes.max() > np.iinfo(np.int32).max:
        raise DataError(
            f"{path}: a document may have {np.iinfo(np.int32).max} tokens at most, the sequences of document "
            f"{first + int(sizes.argmax())} have {sizes.max()}. Build the data again with shorter documents."
        )
    return sizes.astype(np.int32)


def _check_kind(magic: bytes, version: int, code: int, path: Path) -> None:
    if magic[: len(_LAZY_MAGIC)] == _LAZY_MAGIC:
        raise DataError(
            f"{path}: starts with {_LAZY_MAGIC!r}, the index of Megatron-LM's lazy and cached kinds; only the mapped "
            f"kind can be read, {MAGIC!r}. Build it again with --dataset-impl mmap, or with tools/preprocess_data.py."
        )
    if magic != MAGIC:
        raise DataError(
            f"{path}: an index of tokens starts with {MAGIC!r}, this file with {magic!r}. "
            "Give the path without .idx/.bin of a pair made by tools/preprocess_data.py (or by Megatron-LM)."
        )
    if version != VERSION:
        raise DataError(f"{path}: index version must be {VERSION}, got {version}. Build it again.")
    if code not in TOKEN_TYPES:
        hint = " (6 and 7 have meant other things in other years, floating point today)" if code in (6, 7) else ""
        raise DataError(
            f"{path}: token type code must be one of {sorted(TOKEN_TYPES)}, got {code}{hint}. Build it again."
        )


def _document_sizes(starts: np.ndarray, ends: np.ndarray, lengths: np.ndarray, path: Path) -> np.ndarray:
    """Join the sequences of a document: Megatron's files may hold several (sentences) in one."""
    if len(starts) == len(lengths) + 1 and np.array_equal(starts, np.arange(len(starts))):
        return lengths
    return joined_sizes(np.concatenate([np.zeros(1, np.int64), ends])[starts], 0, path)


# An ``.idx`` too large to hold in each process: its sizes where they lie, and starts of every 256th document.
#
# | part of the file | looked at |
# |---|---|
# | header, size of the file | whole |
# | lengths | each, in blocks: none negative; their sum must fit the ``.bin``; their crc32 is part of the fingerprint |
# | byte offsets | first, last and some thousand places; nothing is read by them |
# | document starts | as the offsets where a sidecar tells that our writer made the file, else each |
#
# Blocks are read by ``pread``: a mapping would leave all those pages with the process.

STRIDE = 256
NUM_PROBES = 4096
_BLOCK = 1 << 20
_DOCUMENTS_JOINED = 1 << 16


class LargeIndex:
    """``sizes`` of all documents, ``starts`` of every ``STRIDE``-th one and of the end, ``crc32`` of the sizes.

    Raises:
        DataError: the file is damaged, as far as the table above says.
    """

    def __init__(
        self, path: Path, header: Header, *, reader: str, cache: IndexCache | None, has_metadata: bool
    ) -> None:
        self._path, self._header, self._cache = path, header, cache
        self._file = FileBinReader(path)
        self.starts, self.crc32 = self._scan(self._lengths())
        self._check_offsets()
        if not self._is_document_each(has_metadata):
            self.sizes = self._kept("joined", self._joined)
            self.starts, self.crc32 = self._scan(self.sizes[i : i + _BLOCK] for i in range(0, len(self.sizes), _BLOCK))
        elif reader == "pread":
            self.sizes = self._kept("lengths", self._lengths)
        else:
            mapped = MMapBinReader(path).bytes
            self.sizes = np.ndarray(header.num_sequences, "<i4", mapped, HEADER.size)

    def _numbers(self, place: int, kind: str, first: int, count: int) -> np.ndarray:
        """Return ``count`` numbers, from number ``first`` on, of the array that begins at byte ``place``."""
        width = np.dtype(kind).itemsize
        return self._file.read(place + first * width, count * width).view(kind)

    def _lengths(self) -> Iterator[np.ndarray]:
        count = self._header.num_sequences
        for first in range(0, count, _BLOCK):
            yield self._numbers(HEADER.size, "<i4", first, min(_BLOCK, count - first))

    def _scan(self, blocks: Iterable[np.ndarray]) -> tuple[np.ndarray, int]:
        """Return (tokens before every ``STRIDE``-th of the sizes in ``blocks`` and of all, crc32 of the sizes)."""
        sums, crc32, first = [np.zeros(1, np.int64)], 0, 0
        for block in blocks:
            check_lengths(block, first, self._path)
            sums.append(np.add.reduceat(block, np.arange(0, len(block), STRIDE), dtype=np.int64))
            crc32 = zlib.crc32(block.data, crc32)
            first += len(block)
        return np.cumsum(np.concatenate(sums)), crc32

    def _check_offsets(self) -> None:
        count, width = self._header.num_sequences, self._header.dtype.itemsize
        last = int(self._numbers(HEADER.size, "<i4", count - 1, 1)[0])
        expected = {count - 1: int(self.starts[-1]) - last}
        for block in _spread(-(-count // STRIDE)):
            expected[block * STRIDE] = int(self.starts[block])
        for place, start in expected.items():
            if int(self._numbers(self._header.offsets_at, "<i8", place, 1)[0]) != start * width:
                raise offsets_error(self._path)

    def _is_document_each(self, has_metadata: bool) -> bool:
        """Whether each sequence is a document."""
        count, at = self._header.num_starts, self._header.starts_at
        if has_no_documents(self._numbers(at, "<i8", 0, min(count, 2))):
            return True
        if count != self._header.num_sequences + 1:
            return False
        if not has_metadata:
            blocks = ((first, self._numbers(at, "<i8", first, min(_BLOCK, count - first))) for first in _firsts(count))
            return all(np.array_equal(block, np.arange(first, first + len(block))) for first, block in blocks)
        if any(int(self._numbers(at, "<i8", place, 1)[0]) != place for place in _spread(count)):
            raise starts_error(self._header.num_sequences, self._path)
        return True

    def _joined(self) -> Iterator[np.ndarray]:
        """Yield the sizes of documents of several sequences (sentences), in blocks."""
        num_documents, num_sequences = self._header.num_starts - 1, self._header.num_sequences
        at, wrong = self._header.starts_at, starts_error(self._header.num_sequences, self._path)
        if num_documents < 1 or int(self._numbers(at, "<i8", 0, 1)[0]) != 0:
            raise wrong
        for first in range(0, num_documents, _DOCUMENTS_JOINED):
            starts = self._numbers(at, "<i8", first, min(_DOCUMENTS_JOINED, num_documents - first) + 1)
            if (np.diff(starts) < 0).any() or starts[0] < 0 or starts[-1] > num_sequences:
                raise wrong
            lengths = self._numbers(HEADER.size, "<i4", int(starts[0]), int(starts[-1] - starts[0]))
            ends = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)])
            yield joined_sizes(ends[starts - starts[0]], first, self._path)
        if starts[-1] != num_sequences:
            raise wrong

    def _kept(self, kind: str, blocks: Callable[[], Iterator[np.ndarray]]) -> np.ndarray:
        """Return all blocks as one array: in a file of the cache, else in memory."""
        if self._cache is None:
            return np.concatenate(list(blocks()))
        status = self._path.stat()
        key = repr((kind, str(self._path.resolve()), status.st_size, status.st_mtime_ns, self.crc32))
        name = f"sizes-{hashlib.sha256(key.encode()).hexdigest()[:16]}"
        return self._cache.arrays(name, 1, lambda _: blocks())[0]


def _firsts(count: int) -> range:
    return range(0, count, _BLOCK)


def _spread(count: int) -> list[int]:
    """Return the first, the last and evenly spaced numbers below ``count``."""
    return sorted(set(np.linspace(0, count - 1, min(count, NUM_PROBES)).astype(np.int64).tolist()))


# ``PREFIX.meta.json``: what the pair ``.bin/.idx`` cannot say itself. Other readers ignore it; ours works without.

FORMAT = 1
_CHECKSUM = "crc32"


@dataclasses.dataclass(frozen=True, kw_only=True)
class DatasetMetadata:
    """Facts about a pair of token files, written with it."""

    num_tokens: int
    num_documents: int
    max_token_id: int
    vocab_size: int
    tokenizer: str
    eod_id: int | None
    has_eod: bool
    bin_bytes: int
    bin_crc32: int
    idx_crc32: int
    format: int = FORMAT

    def to_json(self) -> bytes:
        """Return the content of the file: the fields, and their crc32 as one more."""
        fields = dataclasses.asdict(self)
        return (json.dumps(fields | {_CHECKSUM: _crc32(fields)}, indent=2) + "\n").encode()


def read(path: Path) -> DatasetMetadata | None:
    """Return the sidecar at ``path``, or None where there is none.

    Raises:
        DataError: unreadable, of another format, or not what was written (older files do not tell their crc32).
    """
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    return parse(content, path)


def parse(content: bytes, path: Path | str) -> DatasetMetadata:
    """Return the sidecar with this content; ``path`` is for messages.

    Raises:
        DataError: as ``read``.
    """
    try:
        fields = dict(json.loads(content))
        crc32 = fields.pop(_CHECKSUM, None)
        sidecar = DatasetMetadata(**fields)
    except (ValueError, TypeError) as error:
        raise DataError(f"{path}: cannot be read ({error}). Delete it, or build the data again.") from error
    if sidecar.format != FORMAT:
        raise DataError(f"{path}: format must be {FORMAT}, got {sidecar.format}. Build the data again, or delete it.")
    if crc32 is not None and crc32 != _crc32(fields):
        raise DataError(
            f"{path}: its fields have the crc32 {_crc32(fields)}, it says {crc32}: it was damaged or edited. "
            "Build the data again, or delete it."
        )
    return sidecar


def check_belongs(
    sidecar: DatasetMetadata, path: Path, *, num_documents: int, num_tokens: int, idx_crc32: int | None
) -> None:
    """The sidecar read from ``path`` must describe the files beside it; ``idx_crc32`` None: theirs is not known.

    Raises:
        DataError: it describes others.
    """
    expected = f"{sidecar.num_documents} documents of {sidecar.num_tokens} tokens"
    found = f"{num_documents} documents of {num_tokens} tokens"
    if idx_crc32 is not None and sidecar.idx_crc32 != idx_crc32:
        expected, found = f"crc32 {sidecar.idx_crc32:08x}", f"{idx_crc32:08x}"
    if expected != found:
        raise DataError(
            f"{path}: describes another .idx ({expected}) than the one beside it ({found}). Delete it if the .bin and "
            ".idx are right, else build all three again."
        )


def _crc32(fields: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(fields, sort_keys=True).encode())


# The bytes of an ``.idx``, made piece by piece: the one place that writes the format of ``index_format``.

_STARTS_AT_ONCE = 1 << 20


def index_chunks(
    blocks: Callable[[], Iterable[np.ndarray]], num_documents: int, dtype: np.dtype
) -> Iterator[bytes | memoryview]:
    """Yield the bytes of an ``.idx`` with one sequence per document, in memory of one block.

    Args:
        blocks: gives the tokens of each document in order, as arrays of any length; called once per pass.
        num_documents: how many there are in all blocks.
        dtype: type of the tokens in the ``.bin``.
    """
    codes = {np.dtype(kind): code for code, kind in TOKEN_TYPES.items()}
    yield HEADER.pack(MAGIC, VERSION, codes[dtype], num_documents, num_documents + 1)
    for sizes in blocks():
        yield sizes.astype("<i4").data.cast("B")
    start = 0
    for sizes in blocks():
        ends = start + np.cumsum(sizes, dtype=np.int64)
        yield ((ends - sizes) * dtype.itemsize).astype("<i8").data.cast("B")
        start = int(ends[-1])
    for first in range(0, num_documents + 1, _STARTS_AT_ONCE):
        yield np.arange(first, min(first + _STARTS_AT_ONCE, num_documents + 1), dtype="<i8").data.cast("B")
