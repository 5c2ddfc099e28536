"""What glibc does with memory that a stage on a CPU frees."""

from __future__ import annotations

import ctypes
import os

TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3
"""Names of two settings in malloc.h."""
LARGEST_KEPT = 2**30


def keep_freed() -> bool:
    """Let glibc keep what this process frees; return whether it will.

    By itself it gives each freed tensor above 32 MiB back, and the system hands out zeroed pages for the next one: a
    stage that makes logits of [4, 256, 8192] spent a sixth of its time there. Where another allocator is in charge, or
    the user has set one of glibc's own variables (``MALLOC_...``), nothing is changed.

    Source: mallopt(3), ``M_TRIM_THRESHOLD`` and ``M_MMAP_THRESHOLD``.
    """
    if any(variable.startswith("MALLOC_") for variable in os.environ):
        return False
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is None:
        return False
    return all(set_option(option, LARGEST_KEPT) for option in (TRIM_THRESHOLD, MMAP_THRESHOLD))
