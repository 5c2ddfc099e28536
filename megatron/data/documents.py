"""A split's documents: counts, sizes and sums in bounded memory."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import NamedTuple, Protocol

import numpy as np

Documents = tuple[int, int] | np.ndarray
"""The range (start, stop), or an array of ascending document indices (int32 or int64) from a split by hash."""
_BLOCK = 1 << 18


def count_documents(documents: Documents) -> int:
    """Count the documents."""
    return len(documents) if isinstance(documents, np.ndarray) else documents[1] - documents[0]


def index_dtype(documents: Documents) -> type[np.signedinteger]:
    """Choose the integer type for indices of ``documents``: int32 if they fit, else int64."""
    if isinstance(documents, np.ndarray):
        last = int(documents[-1]) if len(documents) else 0
    else:
        last = documents[1] - 1
    return np.int32 if last < 1 << 31 else np.int64


def indices_at(documents: Documents, positions: np.ndarray) -> np.ndarray:
    """Look up the document indices at ``positions`` (from 0) in ``documents``."""
    return documents[positions] if isinstance(documents, np.ndarray) else positions + documents[0]


def position_of(documents: Documents, document: int) -> int | None:
    """Find the position of a document index in ``documents``; None if it is not among them."""
    if not isinstance(documents, np.ndarray):
        return document - documents[0] if documents[0] <= document < documents[1] else None
    position = int(documents.searchsorted(document))
    return position if position < len(documents) and documents[position] == document else None


def windows_of(start: int, stop: int, length: int, overlap: int) -> range:
    """Find the windows of ``length + overlap`` tokens, one every ``length`` tokens, with tokens start ... stop - 1."""
    return range(max((start - overlap) // length, 0), (stop - 1) // length + 1) if stop > start else range(0)


def gather_lengths(lengths: np.ndarray, indices: np.ndarray) -> np.ndarray:
    """Gather ``lengths[indices]`` without copying ``lengths``, even if it is an unaligned view of a mapped file.

    ``take`` copies an unaligned array completely. A view as raw bytes with the same width is always aligned.
    """
    if lengths.flags.aligned:
        return lengths.take(indices)
    return lengths.view(f"V{lengths.itemsize}").take(indices).view(lengths.dtype)


def count_tokens(lengths: np.ndarray, documents: Documents) -> int:
    """Count all tokens in ``documents``; ``lengths`` has the sizes of all documents in the file."""
    if not isinstance(documents, np.ndarray):
        return int(lengths[documents[0] : documents[1]].sum(dtype=np.int64))
    return sum(int(gather_lengths(lengths, block).sum(dtype=np.int64)) for block in _blocks(documents))


def longest_document(lengths: np.ndarray, documents: Documents) -> int:
    """Count the tokens in the longest document."""
    if not isinstance(documents, np.ndarray):
        return int(lengths[documents[0] : documents[1]].max())
    return max(int(gather_lengths(lengths, block).max()) for block in _blocks(documents))


def _blocks(indices: np.ndarray) -> Iterator[np.ndarray]:
    return (indices[begin : begin + _BLOCK] for begin in range(0, len(indices), _BLOCK))


def documents_key(documents: Documents) -> str:
    """Build a unique key for ``documents``: the range as text, or a hash of all indices.

    The key is part of fingerprints in checkpoints, so its format must never change. It is the same for int32 and
    int64.
    """
    if not isinstance(documents, np.ndarray):
        return str((int(documents[0]), int(documents[1])))
    digest = hashlib.sha256()
    for begin in range(0, len(documents), _BLOCK):
        digest.update(documents[begin : begin + _BLOCK].astype("<i8").tobytes())
    return f"{len(documents)} documents {digest.hexdigest()[:16]}"


class TokenSource(Protocol):
    """Tokenized documents: ``IndexedDataset`` or an object with the same interface."""

    @property
    def prefix(self) -> str: ...

    @property
    def document_lengths(self) -> np.ndarray: ...

    @property
    def fingerprint(self) -> str: ...

    def read(self, document: int, offset: int = 0, length: int | None = None) -> np.ndarray: ...


class DocumentSlice(NamedTuple):
    """Part of one document within a window."""

    document: int
    offset: int
    length: int
