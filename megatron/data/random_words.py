"""Random numbers that follow from a key alone, for samples that are the same in every layout, worker and resumed run.

Word i is ``mix(start + i * step)`` with start and step from a hash of the key: nothing is kept between calls, and the
arithmetic is our own, so that no version of numpy changes a sample.

Source: Steele, Lea and Flood 2014, "Fast splittable pseudorandom number generators", section 3 (SplitMix64).
"""

from __future__ import annotations

import hashlib

import numpy as np

_FIRST, _SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def random_words(count: int, *key: int | str) -> np.ndarray:
    """Return uint64[count], uniform over all values."""
    digest = hashlib.blake2b(repr(key).encode(), digest_size=16).digest()
    start, step = int.from_bytes(digest[:8], "little"), int.from_bytes(digest[8:], "little") | 1
    words = np.arange(count, dtype=np.uint64)
    words *= np.uint64(step)
    words += np.uint64(start)
    words ^= words >> np.uint64(30)
    words *= np.uint64(_FIRST)
    words ^= words >> np.uint64(27)
    words *= np.uint64(_SECOND)
    words ^= words >> np.uint64(31)
    return words
