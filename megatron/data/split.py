"""Split a corpus into training, validation and test documents, by position or by a text hash (--split)."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from fractions import Fraction
from functools import cache

import numpy as np

from megatron import log
from megatron.data.cache import IndexCache
from megatron.data.indexed_dataset import IndexedDataset
from megatron.errors import DataError

# A hash over each document's tokens, for splits that depend only on the text.
#
# The hash of tokens t_0 ... t_{n-1} is ``mix(sum_j (t_j + 1) r^j + n s)`` modulo 2^64, with r odd. The sum over a
# document is the difference of two values in a running sum over a token block, multiplied by the inverse power of r
# at the document's start. This takes a few vectorized operations per token, independent of the document lengths.

_BLOCK = 1 << 16
_BASE = 0x9E3779B97F4A7C15
_LENGTH_MULTIPLIER = 0xD6E8FEB86659FD93
_MIX_MULTIPLIER_1, _MIX_MULTIPLIER_2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_MODULUS = 1 << 64


def document_hashes(token_file: IndexedDataset, first: int, stop: int) -> np.ndarray:
    """Hash each document first ... stop - 1: uint32[stop - first], the upper 32 bits.

    The hash depends only on the token ids, not on their storage type or the document position.
    """
    return hashes_of_tokens(token_file.starts_of(first, stop), token_file.read_tokens)


def hashes_of_tokens(starts: np.ndarray, read_tokens: Callable[[int, int], np.ndarray]) -> np.ndarray:
    """Hash documents as ``document_hashes`` does.

    Args:
        starts: int64[documents + 1], the token at which each document begins, and the end of the last one.
        read_tokens: (first token, count) -> tokens.
    """
    hashes = np.zeros(len(starts) - 1, np.uint64)
    for begin in range(int(starts[0]), int(starts[-1]), _BLOCK):
        end = min(begin + _BLOCK, int(starts[-1]))
        _add_block(hashes, starts, begin, read_tokens(begin, end - begin))
    hashes += np.diff(starts).astype(np.uint64) * np.uint64(_LENGTH_MULTIPLIER)
    return (_mix(hashes) >> np.uint64(32)).astype(np.uint32)


def _add_block(hashes: np.ndarray, starts: np.ndarray, begin: int, tokens: np.ndarray) -> None:
    """Add the contributions of ``tokens``, a block that starts at token ``begin``, to the documents' sums."""
    powers, inverse_powers = _powers()
    cumulative = np.zeros(len(tokens) + 1, np.uint64)
    terms = tokens.astype(np.uint64)
    terms += np.uint64(1)
    terms *= powers[: len(tokens)]
    np.cumsum(terms, out=cumulative[1:])
    low = int(np.searchsorted(starts, begin, "right")) - 1
    high = int(np.searchsorted(starts, begin + len(tokens), "left"))
    bounds = np.clip(starts[low : high + 1] - begin, 0, len(tokens))
    contributions = cumulative[bounds[1:]] - cumulative[bounds[:-1]]
    scale = inverse_powers[np.minimum(bounds[:-1], _BLOCK - 1)]
    scale[0] = pow(_BASE, begin - int(starts[low]), _MODULUS)  # this document may begin in an earlier block
    hashes[low:high] += contributions * scale


@cache
def _powers() -> tuple[np.ndarray, np.ndarray]:
    """Compute the base's powers and their inverses modulo 2^64, uint64[_BLOCK] each."""
    powers = []
    for base in (_BASE, pow(_BASE, -1, _MODULUS)):
        factors = np.full(_BLOCK, base, np.uint64)
        factors[0] = 1
        powers.append(np.multiply.accumulate(factors))
    return powers[0], powers[1]


def _mix(values: np.ndarray) -> np.ndarray:
    """Mix each value's bits in place (the final steps of SplitMix64)."""
    values ^= values >> np.uint64(30)
    values *= np.uint64(_MIX_MULTIPLIER_1)
    values ^= values >> np.uint64(27)
    values *= np.uint64(_MIX_MULTIPLIER_2)
    values ^= values >> np.uint64(31)
    return values


# Divide a corpus by ``--split``, by position or by hash.

SPLIT_NAMES = ("train", "valid", "test")
_FORMAT = 1
_DOCUMENTS_PER_FILE = 1 << 22
_IN_MEMORY_BELOW_BYTES = 64 << 20


def split_documents(num_documents: int, split: str) -> list[tuple[int, int]]:
    """Compute (start, stop) for the training, validation and test documents.

    Args:
        split: up to three weights, "949,50,1" or "949/50/1"; missing weights are 0. The boundaries are the rounded
            cumulative fractions of the documents.

    Raises:
        DataError: ``split`` is malformed.
    """
    weights = _parse_split(split)
    bounds, total, cumulative = [0], sum(weights), Fraction(0)
    for weight in weights:
        cumulative += weight
        bounds.append(int(cumulative / total * num_documents + Fraction(1, 2)))
    return list(zip(bounds[:-1], bounds[1:], strict=True))


def split_by_hash(token_file: IndexedDataset, split: str, cache: IndexCache | None) -> list[np.ndarray]:
    """Find the ascending document indices (int32 if they fit) for training, validation and test.

    A document's split depends only on its tokens and ``split``. Equal documents are in the same split, and no
    document moves when other documents are added. The validation split has the lowest hashes and the test split the
    highest. If the validation and test shares grow, these splits therefore keep their documents and receive
    additional ones from the training split.

    All tokens are read once. The result is stored in ``cache`` for all processes and later runs; None: in memory.

    Raises:
        DataError: ``split`` is malformed.
    """
    limits = hash_limits(split)
    if cache is None or token_file.num_tokens * token_file.dtype.itemsize < _IN_MEMORY_BELOW_BYTES:
        hashes = [document_hashes(token_file, 0, token_file.num_documents)]
        return [np.concatenate(list(_select_split(hashes, limits, split_idx))) for split_idx in range(len(SPLIT_NAMES))]
    key = _digest(_FORMAT, _DOCUMENTS_PER_FILE, token_file.fingerprint, token_file.mtime_ns)
    name = f"split-{key}-{_digest(limits)}"
    return cache.arrays(
        name,
        len(SPLIT_NAMES),
        lambda split_idx: _select_split(_cached_hashes(token_file, key, cache), limits, split_idx),
    )


def _cached_hashes(token_file: IndexedDataset, key: str, cache: IndexCache) -> list[np.ndarray]:
    """Hash all documents in blocks; the host's processes divide the computation."""
    count = token_file.num_documents

    def build(file_idx: int) -> list[np.ndarray]:
        first = file_idx * _DOCUMENTS_PER_FILE
        log.info(f"{token_file.prefix}: hashing documents from index {first:,} on ({count:,} in total)")
        return [document_hashes(token_file, first, min(first + _DOCUMENTS_PER_FILE, count))]

    return cache.arrays(f"hashes-{key}", -(-count // _DOCUMENTS_PER_FILE), build, is_durable=True)


def _select_split(hashes: list[np.ndarray], limits: tuple[int, int], split_idx: int) -> Iterator[np.ndarray]:
    """Select the documents in split ``split_idx``, whose hashes are within the split's limits."""
    index_type = np.int32 if sum(map(len, hashes)) <= 1 << 31 else np.int64
    first = 0
    for block in hashes:
        yield (np.flatnonzero(is_in_split(block, limits, split_idx)) + first).astype(index_type)
        first += len(block)


def is_in_split(hashes: np.ndarray, limits: tuple[int, int], split_idx: int) -> np.ndarray:
    """Return bool[documents], True for documents whose hash is within the limits of split ``split_idx``."""
    valid_below, test_from = limits
    low, high = ((valid_below, test_from), (0, valid_below), (test_from, 1 << 32))[split_idx]
    hashes_64 = hashes.astype(np.int64)
    return (hashes_64 >= low) & (hashes_64 < high)


def hash_limits(split: str) -> tuple[int, int]:
    """Compute (exclusive upper limit of validation hashes, lowest test hash)."""
    train, valid, test = _parse_split(split)
    total = train + valid + test
    valid_below = int(valid / total * (1 << 32))
    return valid_below, (1 << 32) - int(test / total * (1 << 32)) if train else valid_below


def _digest(*values: object) -> str:
    return hashlib.sha256(repr(values).encode()).hexdigest()[:16]


def has_one_share(split: str) -> bool:
    """Return True if ``split`` assigns all documents to the training split."""
    train, valid, test = _parse_split(split)
    return train > 0 and not valid and not test


def _parse_split(split: str) -> list[Fraction]:
    message = f"--split must be one to three weights, not negative and not all 0, such as 949,50,1; got {split!r}"
    try:
        weights = [Fraction(text.strip()) for text in split.replace("/", ",").split(",")]
    except (ValueError, ZeroDivisionError) as error:
        raise DataError(message) from error
    if len(weights) > len(SPLIT_NAMES) or min(weights) < 0 or sum(weights) == 0:
        raise DataError(message)
    return weights + [Fraction(0)] * (len(SPLIT_NAMES) - len(weights))
