"""What ranks of tests are forked with lies in large pages, whose table is short."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path

import pytest

from tests.helpers import large_pages
from tests.helpers.harness import run_ranks

SIZE = 32 << 20


def large_bytes() -> int:
    rollup = Path("/proc/self/smaps_rollup").read_text()
    return 1024 * int(re.findall(r"AnonHugePages: +(\d+) kB", rollup)[0])


def _grow(rank: int) -> tuple[int, int, bytes]:
    large_pages.use_large_pages()  # not begun: nothing happens
    kept = ctypes.create_string_buffer(b"x" * SIZE)
    before = large_bytes()
    large_pages.begin()
    large_pages.use_large_pages()
    return before, large_bytes(), kept.raw[SIZE - 2 :]


def test_memory_is_put_into_large_pages_and_keeps_its_bytes() -> None:
    before, after, end = run_ranks(1, _grow, init=False)[0]
    assert end == b"xx\0"
    if after == before:
        pytest.skip("this kernel does not put memory into large pages when asked to (Linux 6.1 does)")
    assert after >= before + SIZE // 2
