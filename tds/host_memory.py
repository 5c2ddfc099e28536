"""What glibc does with memory that a stage on a CPU frees."""

from __future__ import annotations

import ctypes
import os

TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3
"""Names of two settings in malloc.h."""
LARGEST_KEPT = (2**30, 2**25)
"""Bytes of the largest tensor that is kept: what newer releases of glibc take, and what older ones do (32 MiB)."""


def keep_freed() -> bool:
    """Let glibc keep what this process frees; return whether it will.

    By itself it gives each freed tensor above 32 MiB back, and the system hands out zeroed pages for the next one: a
    stage that makes logits of [4, 256, 8192] spent a sixth of its time there. Where another allocator is in charge, or
    the user has set a variable of glibc's own (``MALLOC_...``, or ``glibc.malloc`` in ``GLIBC_TUNABLES``), nothing is
    changed.

    Source: mallopt(3), ``M_TRIM_THRESHOLD`` and ``M_MMAP_THRESHOLD``.
    """
    is_set = any(variable.startswith("MALLOC_") for variable in os.environ)
    if is_set or "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", ""):
        return False
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is None:
        return False
    for size in LARGEST_KEPT:  # the map threshold first: setting the other one alone freezes it where it is
        if set_option(MMAP_THRESHOLD, size):
            return bool(set_option(TRIM_THRESHOLD, LARGEST_KEPT[0]))
    return False
