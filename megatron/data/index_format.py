"""The ``.idx`` format: layout, decoding and checks.

| offset | type | content |
|---|---|---|
| 0 | 9 bytes | ``MMIDIDX`` and two zeros |
| 9 | u64 | version, 1 |
| 17 | u8 | token type code |
| 18, 26 | u64, u64 | S sequences; D = documents + 1 |
| 34 | int32[S], int64[S], int64[D] | lengths in tokens; byte offsets into .bin; first sequence per document |

All numbers are little-endian. The ``.bin`` contains only the tokens. All versions of Megatron-LM can read these files,
and this module reads the files that Megatron-LM has written from 2020 until today. Tools without a notion of documents,
such as CPM's, write a single document start, 0; then each sequence is a document. Megatron-LM's multimodal files have
an additional int8[S] at the end and are rejected.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import NamedTuple

import numpy as np

from megatron.errors import DataError

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
"""Token types by code. Codes 6 and 7 are not supported: their meaning changed between versions of Megatron-LM."""

U16_BELOW_VOCAB_SIZE = 65_500
_LAZY_MAGIC = b"TNTIDX\x00\x00"


class Header(NamedTuple):
    """The header in an ``.idx`` and the array offsets."""

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
    """Choose the token storage type for a vocabulary size."""
    return np.dtype(np.uint16 if vocab_size < U16_BELOW_VOCAB_SIZE else np.int32)


def decode_header(header_bytes: bytes, file_bytes: int, path: Path) -> Header:
    """Decode the header of an ``.idx`` with ``file_bytes`` bytes that starts with ``header_bytes``.

    The counts in the header are checked against the file size before memory is allocated for them.

    Raises:
        DataError: the file is not an index, has an unsupported format, or its size does not match its counts.
    """
    if file_bytes < HEADER.size:
        raise DataError(
            f"{path}: an index has at least {HEADER.size} bytes, but this file has {file_bytes}. Build it again."
        )
    magic, version, code, num_sequences, num_starts = HEADER.unpack_from(header_bytes)
    _check_format(magic, version, code, path)
    header = Header(np.dtype(TOKEN_TYPES[code]), num_sequences, num_starts)
    if file_bytes == header.num_bytes + num_sequences and num_sequences:
        raise DataError(
            f"{path}: {num_sequences} sequences and {num_starts} document starts need {header.num_bytes} bytes, but "
            f"the file has {file_bytes}: one more byte per sequence, as in Megatron-LM's multimodal datasets. "
            "Multimodal datasets are not supported. Build a dataset with text only."
        )
    if file_bytes != header.num_bytes:
        raise DataError(
            f"{path}: {num_sequences} sequences and {num_starts} document starts need {header.num_bytes} bytes, "
            f"but the file has {file_bytes}. It was truncated or damaged. Build it again with tools/preprocess_data.py."
        )
    return header


def decode_index(data: bytes, path: Path) -> tuple[np.ndarray, np.dtype]:
    """Decode an ``.idx`` into (int32 tokens per document, token type).

    Raises:
        DataError: see ``decode_header``; or the three arrays are inconsistent.
    """
    header = decode_header(data[: HEADER.size], len(data), path)
    # The arrays are unaligned in the file. An aligned copy makes later searches about a thousand times faster.
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
    return _document_lengths(starts, ends, lengths, path), header.dtype


def has_no_documents(starts: np.ndarray) -> bool:
    """Check if document starts were written by a tool without a notion of documents."""
    return len(starts) == 1 and starts[0] == 0


def check_lengths(lengths: np.ndarray, first: int, path: Path) -> None:
    """Raise DataError if a length is negative; ``lengths[0]`` is the length of sequence ``first``."""
    if len(lengths) and lengths.min() < 0:
        negative_idx = int(np.flatnonzero(lengths < 0)[0])
        raise DataError(
            f"{path}: lengths must not be negative, but sequence {first + negative_idx} has {lengths[negative_idx]}. "
            "Build it again."
        )


def offsets_error(path: Path) -> DataError:
    """Build the error for an index with wrong byte offsets (second array)."""
    return DataError(f"{path}: byte offsets do not follow from the lengths; the file is damaged. Build it again.")


def starts_error(num_sequences: int, path: Path) -> DataError:
    """Build the error for an index with wrong document starts (third array)."""
    return DataError(
        f"{path}: document starts must increase from 0 to {num_sequences}; the file is damaged. Build it again."
    )


def lengths_from_bounds(bounds: np.ndarray, first: int, path: Path) -> np.ndarray:
    """Compute tokens per document for documents ``first``, ``first`` + 1, ... as int32, from their boundaries."""
    lengths = np.diff(bounds)
    if len(lengths) and lengths.max() > np.iinfo(np.int32).max:
        raise DataError(
            f"{path}: a document may have at most {np.iinfo(np.int32).max} tokens, but the sequences of "
            f"document {first + int(lengths.argmax())} have {lengths.max()}. Build the data again with shorter "
            "documents."
        )
    return lengths.astype(np.int32)


def _check_format(magic: bytes, version: int, code: int, path: Path) -> None:
    if magic[: len(_LAZY_MAGIC)] == _LAZY_MAGIC:
        raise DataError(
            f"{path} starts with {_LAZY_MAGIC!r}, the index format of Megatron-LM's lazy and cached datasets. Only the "
            f"mmap format is supported, {MAGIC!r}. Build it again with --dataset-impl mmap, or with "
            "tools/preprocess_data.py."
        )
    if magic != MAGIC:
        raise DataError(
            f"{path}: a token index starts with {MAGIC!r}, but this file starts with {magic!r}. Use the path, without "
            ".idx or .bin, of token files written by tools/preprocess_data.py or Megatron-LM."
        )
    if version != VERSION:
        raise DataError(f"{path}: index version must be {VERSION}, got {version}. Build it again.")
    if code not in TOKEN_TYPES:
        hint = " (the meaning of 6 and 7 depends on the version of Megatron-LM)" if code in (6, 7) else ""
        raise DataError(
            f"{path}: token type code must be one of {sorted(TOKEN_TYPES)}, got {code}{hint}. Build it again."
        )


def _document_lengths(starts: np.ndarray, ends: np.ndarray, lengths: np.ndarray, path: Path) -> np.ndarray:
    """Compute tokens per document; in Megatron-LM's files a document may have several sequences (sentences)."""
    if len(starts) == len(lengths) + 1 and np.array_equal(starts, np.arange(len(starts))):
        return lengths
    return lengths_from_bounds(np.concatenate([np.zeros(1, np.int64), ends])[starts], 0, path)
