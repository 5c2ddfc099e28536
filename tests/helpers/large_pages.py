"""Memory of a process that forks often, in large pages.

A fork copies the table of pages of the parent, and the end of the child frees it: 70 ms for each GB in pages of 4 kB,
less than 2 ms in pages of 2 MB. A worker of the test run holds 1 GB and forks a thousand ranks.
"""

from __future__ import annotations

import ctypes
import math
import os
from pathlib import Path

GROWTH = 1 << 26
"""Bytes by which a process grows until ``use_large_pages`` looks at it again."""
_LARGE = 1 << 21
_MADV_COLLAPSE = 25  # Linux 6.1; an older one refuses it, and nothing changes
_libc = ctypes.CDLL(None)
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_looked_from = math.inf


def begin() -> None:
    """Let ``use_large_pages`` act in this process, which is to be a long one: it takes 2 ms for each MB."""
    global _looked_from
    _looked_from = 0


def use_large_pages() -> None:
    """Put the memory of this process that is its own into large pages, where it has grown by ``GROWTH`` meanwhile."""
    global _looked_from
    if resident_bytes() < _looked_from:
        return
    for line in Path("/proc/self/maps").read_text().splitlines():
        where, rights, _, _, inode, *_ = line.split()
        start, end = (int(address, 16) for address in where.split("-"))
        if rights == "rw-p" and inode == "0" and end - start >= _LARGE:
            _libc.madvise(start, end - start, _MADV_COLLAPSE)
    _looked_from = resident_bytes() + GROWTH


def resident_bytes() -> int:
    """Return how much memory this process holds."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
