"""Keys of random generators, hashed from the position at which a random number is used."""

from __future__ import annotations

import hashlib
from typing import Any


def hashed(place: tuple[Any, ...], num_bytes: int) -> int:
    """Return the hash of ``place``, an integer of ``num_bytes`` bytes: a key of a generator or of Philox."""
    return int.from_bytes(hashlib.blake2b(repr(place).encode(), digest_size=num_bytes).digest(), "little")
