"""Cutting a corpus into training, validation and test documents by ``--split``: by their place, or by their text."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from fractions import Fraction

import numpy as np

from megatron import log
from megatron.data.cache import Cache
from megatron.data.document_hash import document_hashes
from megatron.data.token_file import TokenFile
from megatron.errors import DataError

NAMES = ("train", "valid", "test")
_FORMAT = 1
_DOCUMENTS_AT_ONCE = 1 << 22
_IN_MEMORY_BELOW_BYTES = 64 << 20


def split_documents(num_documents: int, split: str) -> list[tuple[int, int]]:
    """Return (start, stop) of the documents of train, valid and test.

    Args:
        split: up to three weights, "949,50,1" or "949/50/1"; what is left out is 0. Boundaries lie at the rounded
            cumulative fractions.

    Raises:
        DataError: not such a text.
    """
    weights = _parse(split)
    bounds, total, reached = [0], sum(weights), Fraction(0)
    for weight in weights:
        reached += weight
        bounds.append(int(reached / total * num_documents + Fraction(1, 2)))
    return list(zip(bounds[:-1], bounds[1:], strict=True))


def split_by_hash(token_file: TokenFile, split: str, cache: Cache | None) -> list[np.ndarray]:
    """Return the ascending document numbers (int32 while that holds them) of train, valid and test.

    A document's split follows from its tokens and ``split`` alone: equal documents fall in the same one, and no
    document moves when others are added. Validation takes hashes from the bottom, the test from the top: as long as the
    share of each only grows, it keeps what it had, and takes from the training split alone.

    All tokens are read once. What is found is kept in ``cache``, for all processes and later runs; None: in memory.

    Raises:
        DataError: ``split`` is no such text.
    """
    limits = _limits(split)
    if cache is None or token_file.num_tokens * token_file.dtype.itemsize < _IN_MEMORY_BELOW_BYTES:
        hashes = [document_hashes(token_file, 0, token_file.num_documents)]
        return [np.concatenate(list(_numbers(hashes, limits, part))) for part in range(len(NAMES))]
    key = _digest(_FORMAT, _DOCUMENTS_AT_ONCE, token_file.fingerprint, token_file.token_path.stat().st_mtime_ns)
    name = f"split-{key}-{_digest(limits)}"
    return cache.arrays(name, len(NAMES), lambda part: _numbers(_hashes(token_file, key, cache), limits, part))


def _hashes(token_file: TokenFile, key: str, cache: Cache) -> list[np.ndarray]:
    """Return the hashes of all documents, in parts: each process of the host computes some of them."""
    count = token_file.num_documents

    def build(part: int) -> list[np.ndarray]:
        first = part * _DOCUMENTS_AT_ONCE
        log.info(f"{token_file.prefix}: hashing documents from {first} on, of {count}")
        return [document_hashes(token_file, first, min(first + _DOCUMENTS_AT_ONCE, count))]

    return cache.arrays(f"hashes-{key}", -(-count // _DOCUMENTS_AT_ONCE), build, outlives_boot=True)


def _numbers(hashes: list[np.ndarray], limits: tuple[int, int], part: int) -> Iterator[np.ndarray]:
    """Yield the document numbers of one split: of those whose hashes lie between its limits."""
    kind = np.int32 if sum(map(len, hashes)) <= 1 << 31 else np.int64
    valid_below, test_from = limits
    low, high = ((valid_below, test_from), (0, valid_below), (test_from, 1 << 32))[part]
    first = 0
    for block in hashes:
        wide = block.astype(np.int64)
        yield (np.flatnonzero((wide >= low) & (wide < high)) + first).astype(kind)
        first += len(block)


def _limits(split: str) -> tuple[int, int]:
    """Return (hashes below it are validation, hashes from it on are test)."""
    train, valid, test = _parse(split)
    total = train + valid + test
    valid_below = int(valid / total * (1 << 32))
    return valid_below, (1 << 32) - int(test / total * (1 << 32)) if train else valid_below


def _digest(*parts: object) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def _parse(split: str) -> list[Fraction]:
    wrong = f"--split must be one to three weights, not negative and not all 0, such as 949,50,1; got {split!r}"
    try:
        weights = [Fraction(part.strip()) for part in split.replace("/", ",").split(",")]
    except (ValueError, ZeroDivisionError) as error:
        raise DataError(wrong) from error
    if len(weights) > len(NAMES) or min(weights) < 0 or sum(weights) == 0:
        raise DataError(wrong)
    return weights + [Fraction(0)] * (len(NAMES) - len(weights))
