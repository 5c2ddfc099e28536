"""The ``.idx`` file: how many tokens each document of the ``.bin`` beside it holds.

| offset | type | content |
|---|---|---|
| 0 | 9 bytes | ``MMIDIDX`` and two zeros |
| 9 | u64 | version, 1 |
| 17 | u8 | code of the token type |
| 18, 26 | u64, u64 | S sequences; D = documents + 1 |
| 34 | int32[S], int64[S], int64[D] | lengths in tokens; byte offsets into .bin; first sequence of each document |

Little-endian throughout. The ``.bin`` is the tokens alone. Readers of Megatron-LM of any age open these files. Tools
that know no documents, as CPM's, leave one document start, 0: each sequence then is a document.
"""

from __future__ import annotations

import struct
from pathlib import Path

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
"""Codes 6 and 7 are left out: their meaning changed over the years, so nobody can know what such a file holds."""

U16_BELOW_VOCAB_SIZE = 65_500


def token_type(vocab_size: int) -> np.dtype:
    """Return the type that tokens of a vocabulary of this size are stored in."""
    return np.dtype(np.uint16 if vocab_size < U16_BELOW_VOCAB_SIZE else np.int32)


def encode_index(sizes: np.ndarray, dtype: np.dtype) -> bytes:
    """Return the bytes of an ``.idx`` with one sequence per document."""
    codes = {np.dtype(kind): code for code, kind in TOKEN_TYPES.items()}
    ends = np.cumsum(sizes, dtype=np.int64)
    offsets = (ends - sizes) * dtype.itemsize
    starts = np.arange(len(sizes) + 1, dtype="<i8")
    header = HEADER.pack(MAGIC, VERSION, codes[dtype], len(sizes), len(sizes) + 1)
    return header + sizes.astype("<i4").tobytes() + offsets.astype("<i8").tobytes() + starts.tobytes()


def decode_index(data: bytes, path: Path) -> tuple[np.ndarray, np.dtype]:
    """Return (tokens of each document as int32, token type) from the bytes of an ``.idx``.

    Raises:
        DataError: not such a file, cut short, or its three arrays disagree. Nothing is allocated by the counts that
            the file claims before they are seen to fit its size.
    """
    dtype, num_sequences, num_starts = _decode_header(data, path)
    expected = HEADER.size + 12 * num_sequences + 8 * num_starts
    if len(data) != expected:
        raise DataError(
            f"{path}: {num_sequences} sequences and {num_starts} document starts need {expected} bytes, the file has "
            f"{len(data)}. It was cut short or damaged: build it again with tools/preprocess_data.py."
        )
    # The arrays lie unaligned in the file; one aligned copy makes every later search some thousand times faster.
    lengths = np.frombuffer(data, "<i4", num_sequences, HEADER.size).astype(np.int32)
    offsets = np.frombuffer(data, "<i8", num_sequences, HEADER.size + 4 * num_sequences)
    starts = np.frombuffer(data, "<i8", num_starts, HEADER.size + 12 * num_sequences).astype(np.int64)
    ends = np.cumsum(lengths, dtype=np.int64)
    _check_arrays(lengths, offsets, starts, ends, dtype, path)
    return _document_sizes(starts, ends, lengths), dtype


def _decode_header(data: bytes, path: Path) -> tuple[np.dtype, int, int]:
    if len(data) < HEADER.size:
        raise DataError(
            f"{path}: an index has at least {HEADER.size} bytes, this file has {len(data)}. Build it again."
        )
    magic, version, code, num_sequences, num_starts = HEADER.unpack_from(data)
    if magic != MAGIC:
        raise DataError(
            f"{path}: an index of tokens starts with {MAGIC!r}, this file with {magic!r}. "
            "Give the path without .idx/.bin of a pair made by tools/preprocess_data.py (or by Megatron-LM)."
        )
    if version != VERSION:
        raise DataError(f"{path}: index version must be {VERSION}, got {version}. Build it again.")
    if code not in TOKEN_TYPES:
        raise DataError(f"{path}: token type code must be one of {sorted(TOKEN_TYPES)}, got {code}. Build it again.")
    return np.dtype(TOKEN_TYPES[code]), num_sequences, num_starts


def _check_arrays(
    lengths: np.ndarray, offsets: np.ndarray, starts: np.ndarray, ends: np.ndarray, dtype: np.dtype, path: Path
) -> None:
    if (lengths < 0).any():
        worst = int(np.flatnonzero(lengths < 0)[0])
        raise DataError(f"{path}: lengths must not be negative, sequence {worst} has {lengths[worst]}. Build it again.")
    if not np.array_equal(offsets, (ends - lengths) * dtype.itemsize):
        raise DataError(f"{path}: byte offsets do not follow from the lengths; the file is damaged. Build it again.")
    if _has_no_documents(starts):
        return
    if len(starts) == 0 or starts[0] != 0 or starts[-1] != len(lengths) or (np.diff(starts) < 0).any():
        raise DataError(
            f"{path}: document starts must rise from 0 to {len(lengths)} sequences; the file is damaged. "
            "Build it again."
        )


def _document_sizes(starts: np.ndarray, ends: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Join the sequences of a document: Megatron's files may hold several (sentences) in one."""
    if _has_no_documents(starts):
        return lengths
    if len(starts) == len(lengths) + 1 and np.array_equal(starts, np.arange(len(starts))):
        return lengths
    bounds = np.concatenate([np.zeros(1, np.int64), ends])[starts]
    return np.diff(bounds).astype(np.int32)


def _has_no_documents(starts: np.ndarray) -> bool:
    return len(starts) == 1 and starts[0] == 0
