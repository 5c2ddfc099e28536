"""Keys for random generators, hashed from the position where a random number is used."""

from __future__ import annotations

import hashlib
from typing import Any


def hash_key(fields: tuple[Any, ...], num_bytes: int) -> int:
    """Hash the position ``fields`` to a generator or Philox key, an int with ``num_bytes`` bytes.

    Args:
        fields: values that identify the position, such as seed, step, layer and site.
    """
    return int.from_bytes(hashlib.blake2b(repr(fields).encode(), digest_size=num_bytes).digest(), "little")
