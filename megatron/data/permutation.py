"""Feistel permutation and counter-based random words: order as arithmetic."""

from __future__ import annotations

import hashlib

import numpy as np

# A shuffle that needs no memory: a six-round Feistel network over the smallest square of a power of two that holds the
# range, repeated until the value falls inside (cycle walking).
#
# The same arithmetic runs on Python ints and on uint64 arrays. It depends on nothing but (size, key), so an order is
# the same on every machine and under every version of numpy.
#
# Source: Black and Rogaway 2002, "Ciphers with arbitrary finite domains", sections 3 and 4.

_NUM_ROUNDS = 6
_MASK64 = 0xFFFF_FFFF_FFFF_FFFF
_MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_IN_CACHE = 1 << 14
"""Values that go through all rounds together: with the scratch space they stay in the processor's second cache."""
_AT_ONCE = 1 << 18
"""Values that are walked together: many, since what is still outside shrinks to short arrays."""


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
        values = indices.astype(np.uint64)
        for begin in range(0, len(values), _AT_ONCE):
            self._walk(values[begin : begin + _AT_ONCE])
        return values.astype(np.int64)

    def fill(self, places: np.ndarray, start: int) -> None:
        """Write into ``places``, of any integer type that holds the size, where start, start + 1, ... go."""
        for begin in range(0, len(places), _AT_ONCE):
            part = places[begin : begin + _AT_ONCE]
            values = np.arange(start + begin, start + begin + len(part), dtype=np.uint64)
            self._walk(values)
            part[:] = values

    def _once(self, value: int) -> int:
        left, right = value >> self._half_bits, value & self._mask
        for key in self._keys:
            left, right = right, left ^ (_mix(right ^ key) & self._mask)
        return (left << self._half_bits) | right

    def _walk(self, values: np.ndarray) -> None:
        """Replace each of ``values`` by where it goes."""
        scratch = np.empty((3, min(len(values), _IN_CACHE)), np.uint64)
        size = np.uint64(self.size)
        self._once_in_place(values, scratch)
        outside = np.flatnonzero(values >= size)
        while len(outside):
            again = values[outside]
            self._once_in_place(again, scratch)
            values[outside] = again
            outside = outside[again >= size]

    def _once_in_place(self, values: np.ndarray, scratch: np.ndarray) -> None:
        half_bits, mask = np.uint64(self._half_bits), np.uint64(self._mask)
        for begin in range(0, len(values), _IN_CACHE):
            block = values[begin : begin + _IN_CACHE]
            left, right, mixed = scratch[:, : len(block)]
            np.right_shift(block, half_bits, out=left)
            np.bitwise_and(block, mask, out=right)
            for key in self._keys:
                np.bitwise_xor(right, np.uint64(key), out=mixed)
                _mix_in_place(mixed, block)
                np.bitwise_and(mixed, mask, out=mixed)
                np.bitwise_xor(left, mixed, out=left)
                left, right = right, left
            np.left_shift(left, half_bits, out=block)
            np.bitwise_or(block, right, out=block)


def _mix(value: int) -> int:
    value = (value * _MULTIPLIERS[0]) & _MASK64
    value = value ^ (value >> 27)
    value = (value * _MULTIPLIERS[1]) & _MASK64
    return value >> 32


def _mix_in_place(values: np.ndarray, scratch: np.ndarray) -> None:
    """``_mix`` of each of ``values``; overwrites ``scratch`` of the same length."""
    np.multiply(values, np.uint64(_MULTIPLIERS[0]), out=values)
    np.right_shift(values, np.uint64(27), out=scratch)
    np.bitwise_xor(values, scratch, out=values)
    np.multiply(values, np.uint64(_MULTIPLIERS[1]), out=values)
    np.right_shift(values, np.uint64(32), out=values)


# Random numbers that follow from a key alone, for samples that are the same in every layout, worker and resumed run.
#
# Word i is ``mix(start + i * step)`` with start and step from a hash of the key: nothing is kept between calls, and the
# arithmetic is our own, so that no version of numpy changes a sample.
#
# Source: Steele, Lea and Flood 2014, "Fast splittable pseudorandom number generators", section 3 (SplitMix64).

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
