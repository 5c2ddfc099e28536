"""The crc32 of two pieces laid end to end, from the crc32 of each: nothing has to be read again."""

from __future__ import annotations

_POLYNOMIAL = 0xEDB88320
"""That of zlib, with the lowest power in the highest bit, as all numbers here."""

_ONE, _ONE_BYTE = 1 << 31, 1 << 23  # x^0 and x^8


def combine(first: int, second: int, second_bytes: int) -> int:
    """Return the crc32 of A + B, given those of A and of B and the number of bytes in B.

    Source: the checks of the pieces are remainders, so that of A is multiplied by x^(8 bytes of B); Mark Adler's
    note in zlib's crc32_combine.
    """
    shift, square = _ONE, _ONE_BYTE
    while second_bytes:
        if second_bytes & 1:
            shift = _multiply(shift, square)
        square = _multiply(square, square)
        second_bytes >>= 1
    return _multiply(shift, first) ^ second


def _multiply(left: int, right: int) -> int:
    product = 0
    for bit in range(31, -1, -1):
        if left >> bit & 1:
            product ^= right
        right = right >> 1 ^ (_POLYNOMIAL if right & 1 else 0)
    return product
