"""The CRC-32 of a file from those of its segments, so that many hands can read one file.

CRC-32 is a remainder of polynomials over {0, 1}: appending n bytes multiplies what came before by x^(8 n). A polynomial
is an int whose highest bit is the coefficient of x^0, as in zlib.

Source: Peterson and Brown 1961, "Cyclic codes for error detection"; IEEE 802.3 has the polynomial.
"""

from __future__ import annotations

from functools import cache, reduce

_MODULUS = 0xEDB88320  # without its x^32
_ONE, _X = 1 << 31, 1 << 30


def joined(parts: list[tuple[int, int]]) -> int:
    """Return the CRC-32 of segments that follow each other, from the (crc32, number of bytes) of each."""
    return reduce(lambda crc, part: _times(crc, _x_to(8 * part[1])) ^ part[0], parts, 0)


def _times(a: int, b: int) -> int:
    product = 0
    while a:
        if a & _ONE:
            product ^= b
        a = a << 1 & 0xFFFFFFFF
        b = b >> 1 ^ (_MODULUS if b & 1 else 0)  # times x
    return product


@cache
def _x_to(power: int) -> int:
    result, square = _ONE, _X
    while power:
        if power & 1:
            result = _times(result, square)
        square = _times(square, square)
        power >>= 1
    return result
