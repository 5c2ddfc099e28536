"""Keys of random generators, hashed from the position at which a random number is used."""

from __future__ import annotations

import hashlib
from typing import Any


def hash_key(fields: tuple[Any, ...], num_bytes: int) -> int:
    """Return a key for a generator or for Philox: the hash of the position ``fields`` as an int of ``num_bytes`` bytes.

    Args:
        fields: the values that identify the position, such as seed, step, layer and site.
    """
    return int.from_bytes(hashlib.blake2b(repr(fields).encode(), digest_size=num_bytes).digest(), "little")
