"""Documents of a split: counts, sizes and sums in bounded memory."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import NamedTuple, Protocol

import numpy as np

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
