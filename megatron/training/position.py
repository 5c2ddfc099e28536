"""Where this rank is at, for whoever must say it when the rank cannot any more.

What is noted lies in a page of memory that is also a file of the launcher, so it outlives a SIGKILL. The page is named
by MEGATRON_FAILURE_FILE and the rank's number; without our launcher it is the process's own.

| line of the page | holds |
|---|---|
| 1 | the rank's place: "stage 1, tensor 0, data 0" |
| 2 | what it is at: "step 7, forward of micro-batch 3" |
"""

from __future__ import annotations

import mmap
import os
import re

SIZE = 512
_PLACE_SIZE = 96
_page: mmap.mmap | bytearray = bytearray(SIZE)


def open_page() -> None:
    """From now on note in the page that the launcher reads, if there is a launcher."""
    global _page
    failure = os.environ.get("MEGATRON_FAILURE_FILE")
    if not failure:
        return
    try:
        descriptor = os.open(page_of(failure, int(os.environ.get("RANK", "0"))), os.O_CREAT | os.O_RDWR, 0o600)
        try:
            os.ftruncate(descriptor, SIZE)
            _page = mmap.mmap(descriptor, SIZE)
        finally:
            os.close(descriptor)
    except OSError:  # the launcher is gone, or its disk is full: this rank loses nothing by it
        return


def page_of(failure_file: str, rank: int) -> str:
    """Return the path of a rank's page."""
    return f"{failure_file}.at-{rank}"


def name_rank(who: str) -> None:
    """Note the rank's place, as in "rank 3 (stage 1, tensor 0, data 0)"."""
    within = re.search(r"\((.*)\)", who)
    _write(0, _PLACE_SIZE, within.group(1) if within else who)


def note(text: str) -> None:
    """Note what this rank is at from now on; about a microsecond."""
    _write(_PLACE_SIZE, SIZE, text)


def now() -> str | None:
    """Return what this process noted last, or None."""
    return read(bytes(_page))[1] or None


def read(page: bytes) -> tuple[str, str]:
    """Return (place, what it is at) of a page's bytes; empty where nothing was noted."""
    place, at = (part.split(b"\0", 1)[0].decode(errors="replace") for part in (page[:_PLACE_SIZE], page[_PLACE_SIZE:]))
    return place, at


def _write(start: int, end: int, text: str) -> None:
    length = end - start
    _page[start:end] = text.encode()[: length - 1].ljust(length, b"\0")
