"""A hash of each document's tokens, for splits that follow from the text alone.

The hash of tokens t_0 ... t_{n-1} is ``mix(sum_j (t_j + 1) r^j + n s)`` modulo 2^64, with r odd. Sums over a document
are differences of one running sum over a block of tokens, multiplied by the inverse power of r for the place where the
document begins: a few operations for each token, whatever the documents' lengths.
"""

from __future__ import annotations

from functools import cache

import numpy as np

from megatron.data.token_file import TokenFile

_BLOCK = 1 << 16
_BASE = 0x9E3779B97F4A7C15
_OF_LENGTH = 0xD6E8FEB86659FD93
_FIRST, _SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_MODULUS = 1 << 64


def document_hashes(token_file: TokenFile, first: int, stop: int) -> np.ndarray:
    """Return uint32[stop - first], the upper half of the hash of documents first ... stop - 1.

    It follows from the token ids alone: not from the type they are stored in, nor from where the document lies.
    """
    starts = token_file.starts_of(first, stop)
    sums = np.zeros(stop - first, np.uint64)
    for begin in range(int(starts[0]), int(starts[-1]), _BLOCK):
        end = min(begin + _BLOCK, int(starts[-1]))
        _add_block(sums, starts, begin, token_file.read_tokens(begin, end - begin))
    sums += np.diff(starts).astype(np.uint64) * np.uint64(_OF_LENGTH)
    return (_mix(sums) >> np.uint64(32)).astype(np.uint32)


def _add_block(sums: np.ndarray, starts: np.ndarray, begin: int, tokens: np.ndarray) -> None:
    """Add to ``sums`` what ``tokens``, the first of which is token ``begin`` of the file, add to their documents."""
    powers, inverse_powers = _powers()
    running = np.zeros(len(tokens) + 1, np.uint64)
    terms = tokens.astype(np.uint64)
    terms += np.uint64(1)
    terms *= powers[: len(tokens)]
    np.cumsum(terms, out=running[1:])
    low = int(np.searchsorted(starts, begin, "right")) - 1
    high = int(np.searchsorted(starts, begin + len(tokens), "left"))
    bounds = np.clip(starts[low : high + 1] - begin, 0, len(tokens))
    parts = running[bounds[1:]] - running[bounds[:-1]]
    scale = inverse_powers[np.minimum(bounds[:-1], _BLOCK - 1)]
    scale[0] = pow(_BASE, begin - int(starts[low]), _MODULUS)  # this one may have begun in an earlier block
    sums[low:high] += parts * scale


@cache
def _powers() -> tuple[np.ndarray, np.ndarray]:
    """Return uint64[_BLOCK] each: the powers of the base, and their inverses modulo 2^64."""
    both = []
    for base in (_BASE, pow(_BASE, -1, _MODULUS)):
        factors = np.full(_BLOCK, base, np.uint64)
        factors[0] = 1
        both.append(np.multiply.accumulate(factors))
    return both[0], both[1]


def _mix(values: np.ndarray) -> np.ndarray:
    """Spread what differs in any bit over all bits (SplitMix64's last steps), in place."""
    values ^= values >> np.uint64(30)
    values *= np.uint64(_FIRST)
    values ^= values >> np.uint64(27)
    values *= np.uint64(_SECOND)
    values ^= values >> np.uint64(31)
    return values
