"""Keys of random generators, hashed from where a random number is used."""

from __future__ import annotations

import hashlib
from typing import Any


def hashed(place: tuple[Any, ...], num_bytes: int) -> int:
    """Return the key that belongs to ``place``: of a generator, or of Philox."""
    return int.from_bytes(hashlib.blake2b(repr(place).encode(), digest_size=num_bytes).digest(), "little")
