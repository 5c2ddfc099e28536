"""Stateless shuffling and random numbers: a Feistel permutation and counter-based random words."""

from __future__ import annotations

import hashlib

import numpy as np

# A shuffle without stored state: a six-round Feistel network over the smallest square of a power of two that covers the
# range. It is applied repeatedly until the value is inside the range (cycle walking).
#
# The same arithmetic is implemented for Python ints and for uint64 arrays. It depends only on (size, key), so an order
# is the same on every machine and with every numpy version.
#
# Source: Black and Rogaway 2002, "Ciphers with arbitrary finite domains", sections 3 and 4.

_NUM_ROUNDS = 6
_MASK64 = 0xFFFF_FFFF_FFFF_FFFF
_MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_ROUND_BLOCK = 1 << 14
"""Values per block of the rounds; together with the scratch space they fit into the L2 cache."""
_WALK_BLOCK = 1 << 18
"""Values per block of cycle walking; large, because the array of values outside the range shrinks quickly."""


class Permutation:
    """Permutation over 0 ... size - 1 chosen by ``key``."""

    def __init__(self, size: int, *key: int | str) -> None:
        self.size = size
        self._half_bits = max(1, (max(size - 1, 1).bit_length() + 1) // 2)
        self._mask = (1 << self._half_bits) - 1
        digest = hashlib.blake2b(repr(key).encode(), digest_size=8 * _NUM_ROUNDS).digest()
        self._keys = [int.from_bytes(digest[8 * i : 8 * i + 8], "little") for i in range(_NUM_ROUNDS)]

    def __call__(self, index: int) -> int:
        """Return the image of ``index``."""
        value = self._apply_rounds(index)
        while value >= self.size:
            value = self._apply_rounds(value)
        return value

    def inverse(self, image: int) -> int:
        """Return the index whose image is ``image``."""
        value = self._invert_rounds(image)
        while value >= self.size:
            value = self._invert_rounds(value)
        return value

    def array(self, indices: np.ndarray) -> np.ndarray:
        """Return the images of ``indices`` as int64."""
        values = indices.astype(np.uint64)
        for begin in range(0, len(values), _WALK_BLOCK):
            self._cycle_walk(values[begin : begin + _WALK_BLOCK])
        return values.astype(np.int64)

    def fill(self, out: np.ndarray, start: int) -> None:
        """Write the images of start, start + 1, ... into ``out``, with any sufficiently wide integer type."""
        for begin in range(0, len(out), _WALK_BLOCK):
            block = out[begin : begin + _WALK_BLOCK]
            values = np.arange(start + begin, start + begin + len(block), dtype=np.uint64)
            self._cycle_walk(values)
            block[:] = values

    def _apply_rounds(self, value: int) -> int:
        """Apply the Feistel network once; the result may be outside the range."""
        left, right = value >> self._half_bits, value & self._mask
        for key in self._keys:
            left, right = right, left ^ (_mix(right ^ key) & self._mask)
        return (left << self._half_bits) | right

    def _invert_rounds(self, value: int) -> int:
        """Invert ``_apply_rounds``."""
        left, right = value >> self._half_bits, value & self._mask
        for key in reversed(self._keys):
            left, right = right ^ (_mix(left ^ key) & self._mask), left
        return (left << self._half_bits) | right

    def _cycle_walk(self, values: np.ndarray) -> None:
        """Replace each value by its image."""
        scratch = np.empty((3, min(len(values), _ROUND_BLOCK)), np.uint64)
        size = np.uint64(self.size)
        self._apply_rounds_in_place(values, scratch)
        outside = np.flatnonzero(values >= size)
        while len(outside):
            outside_values = values[outside]
            self._apply_rounds_in_place(outside_values, scratch)
            values[outside] = outside_values
            outside = outside[outside_values >= size]

    def _apply_rounds_in_place(self, values: np.ndarray, scratch: np.ndarray) -> None:
        half_bits, mask = np.uint64(self._half_bits), np.uint64(self._mask)
        for begin in range(0, len(values), _ROUND_BLOCK):
            block = values[begin : begin + _ROUND_BLOCK]
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
    """Apply ``_mix`` to ``values`` in place; ``scratch`` has the same length and is overwritten."""
    np.multiply(values, np.uint64(_MULTIPLIERS[0]), out=values)
    np.right_shift(values, np.uint64(27), out=scratch)
    np.bitwise_xor(values, scratch, out=values)
    np.multiply(values, np.uint64(_MULTIPLIERS[1]), out=values)
    np.right_shift(values, np.uint64(32), out=values)


# Random numbers that depend only on a key, for samples that are the same in every layout, worker and resumed run.
#
# Word i is ``mix(start + i * step)`` with start and step from a hash of the key. There is no state between calls, and
# numpy's generators are not used, so that samples do not depend on the numpy version.
#
# Source: Steele, Lea and Flood 2014, "Fast splittable pseudorandom number generators", section 3 (SplitMix64).

_WORD_MULTIPLIER_1, _WORD_MULTIPLIER_2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def random_words(count: int, *key: int | str) -> np.ndarray:
    """Draw uint64[count], uniformly distributed over all values."""
    digest = hashlib.blake2b(repr(key).encode(), digest_size=16).digest()
    start, step = int.from_bytes(digest[:8], "little"), int.from_bytes(digest[8:], "little") | 1
    words = np.arange(count, dtype=np.uint64)
    words *= np.uint64(step)
    words += np.uint64(start)
    words ^= words >> np.uint64(30)
    words *= np.uint64(_WORD_MULTIPLIER_1)
    words ^= words >> np.uint64(27)
    words *= np.uint64(_WORD_MULTIPLIER_2)
    words ^= words >> np.uint64(31)
    return words
