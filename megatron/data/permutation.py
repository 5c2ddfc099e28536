"""A shuffle that needs no memory: a six-round Feistel network over the smallest square of a power of two that holds the
range, repeated until the value falls inside (cycle walking).

The same arithmetic runs on Python ints and on uint64 arrays. It depends on nothing but (size, key), so an order is the
same on every machine and under every version of numpy.

Source: Black and Rogaway 2002, "Ciphers with arbitrary finite domains", sections 3 and 4.
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np

_NUM_ROUNDS = 6
_MASK64 = 0xFFFF_FFFF_FFFF_FFFF
_MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)


class Permutation:
    """A permutation of 0 ... size - 1 chosen by ``key``."""

    def __init__(self, size: int, *key: int | str) -> None:
        self.size = size
        self._half_bits = max(1, (max(size - 1, 1).bit_length() + 1) // 2)
        self._mask = (1 << self._half_bits) - 1
        digest = hashlib.blake2b(repr(key).encode(), digest_size=8 * _NUM_ROUNDS).digest()
        self._keys = [int.from_bytes(digest[8 * i : 8 * i + 8], "little") for i in range(_NUM_ROUNDS)]

    def __call__(self, index: int) -> int:
        """Return where ``index`` goes."""
        value = self._once(index)
        while value >= self.size:
            value = self._once(value)
        return value

    def array(self, indices: np.ndarray) -> np.ndarray:
        """Return where each of ``indices`` goes, as int64."""
        values = self._once(indices.astype(np.uint64))
        outside = np.flatnonzero(values >= self.size)
        while len(outside):
            values[outside] = self._once(values[outside])
            outside = outside[values[outside] >= self.size]
        return values.astype(np.int64)

    def _once(self, value: Any) -> Any:
        left, right = value >> self._half_bits, value & self._mask
        for key in self._keys:
            left, right = right, left ^ (_mix(right ^ key) & self._mask)
        return (left << self._half_bits) | right


def _mix(value: Any) -> Any:
    value = (value * _MULTIPLIERS[0]) & _MASK64
    value = value ^ (value >> 27)
    value = (value * _MULTIPLIERS[1]) & _MASK64
    return value >> 32
