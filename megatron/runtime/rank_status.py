"""The status page of a rank: its current step and operation, readable by the launcher.

What is noted lies in a page of memory that is also a file of the launcher, so it outlives a SIGKILL. The page is
named by MEGATRON_FAILURE_FILE and the rank's number; without our launcher it is the process's own.

| line of the page | holds |
|---|---|
| 1 | the rank's place: "stage 1, tensor 0, data 0" |
| 2 | what it is at: "step 7, forward of micro-batch 3" |
| 3 | ``RUNNING`` from the beginning of the run to its end, ``LATE`` once it has said that the others wait for it, |
|   | ``IDLE`` of a rank that an elastic job has no work for (megatron/config/elastic.py), ``REGROUP`` of one that |
|   | has saved and leaves so that a node can be taken in |
| 4 | when it said why it ends, in seconds of ``time.monotonic()``, which all processes of a machine share |
"""

from __future__ import annotations

import mmap
import os
import re
import time
from itertools import pairwise
from typing import NamedTuple

SIZE = 512
RUNNING, LATE, IDLE, REGROUP = "running", "late", "idle", "regroup"
_BOUNDS = (0, 96, 480, 488, SIZE)
_page: mmap.mmap | bytearray = bytearray(SIZE)


class Position(NamedTuple):
    """The lines of a page; empty where nothing was noted."""

    place: str = ""
    doing: str = ""
    state: str = ""
    said_at: float = 0.0

    @property
    def is_running(self) -> bool:
        """Whether its run has begun and neither ended nor said why it stops."""
        return bool(self.state)


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
    _write(0, within.group(1) if within else who)


def heartbeat_note(text: str) -> None:
    """Note what this rank is at from now on; about a microsecond."""
    _write(1, text)


def note_state(state: str) -> None:
    """Note ``RUNNING``, ``LATE``, ``IDLE``, ``REGROUP``, or "" once the run has ended."""
    _write(2, state)


def note_reporting() -> None:
    """Note that this rank says now why it ends."""
    _write(3, repr(time.monotonic()))


def heartbeat_now() -> str | None:
    """Return what this process noted last of what it is at, or None."""
    return own().doing or None


def own() -> Position:
    """Return what this process has noted."""
    return read_position(bytes(_page))


def read_position(page: bytes) -> Position:
    """Return what a page's bytes say."""
    lines = (page[start:end].split(b"\0", 1)[0].decode(errors="replace") for start, end in pairwise(_BOUNDS))
    place, doing, state, said_at = lines
    return Position(place, doing, state, float(said_at or 0.0))


def _write(line: int, text: str) -> None:
    start, end = _BOUNDS[line : line + 2]
    length = end - start
    _page[start:end] = text.encode()[: length - 1].ljust(length, b"\0")
