"""What ranks of tests are forked with lies in large pages, whose table is short."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path

import pytest

from tests.helpers import large_pages
from tests.helpers.harness import run_ranks

BUFFER_BYTES = 32 << 20


def read_large_page_bytes() -> int:
    rollup = Path("/proc/self/smaps_rollup").read_text()
    return 1024 * int(re.findall(r"AnonHugePages: +(\d+) kB", rollup)[0])


def _allocate_buffer(rank: int) -> tuple[int, int, bytes]:
    large_pages.use_large_pages()  # not begun: nothing happens
    buffer = ctypes.create_string_buffer(b"x" * BUFFER_BYTES)
    before = read_large_page_bytes()
    large_pages.enable()
    large_pages.use_large_pages()
    return before, read_large_page_bytes(), buffer.raw[BUFFER_BYTES - 2 :]


def test_large_pages_preserve_memory_contents() -> None:
    before, after, end = run_ranks(1, _allocate_buffer, init=False)[0]
    assert end == b"xx\0"
    if after == before:
        pytest.skip("this kernel does not put memory into large pages when asked to (Linux 6.1 does)")
    assert after >= before + BUFFER_BYTES // 2
