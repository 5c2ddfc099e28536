"""Status page of a rank: its current step and operation, readable by the launcher.

The page is a memory-mapped file in the launcher's folder, so it survives a SIGKILL of the rank. Its path consists of
MEGATRON_FAILURE_FILE and the rank. Without our launcher it is private memory.

| line of the page | content |
|---|---|
| 1 | the rank's coordinates: "stage 1, tensor 0, data 0" |
| 2 | the current operation: "step 7, forward of micro-batch 3" |
| 3 | the state: ``RUNNING`` during the run; ``LATE`` once the rank has reported that other ranks wait for it; |
|   | ``IDLE`` for a rank without work in an elastic job (megatron/config/elastic.py); ``REGROUP`` for a rank that |
|   | has saved and exits so that a node can join |
| 4 | the time of the rank's error report in seconds of ``time.monotonic()``, which all processes share |
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
    """The lines of a page; empty if nothing was written."""

    place: str = ""
    doing: str = ""
    state: str = ""
    said_at: float = 0.0

    @property
    def is_running(self) -> bool:
        """True between the start of the rank's run and its end, error or stop."""
        return bool(self.state)


def open_page() -> None:
    """Map the page into the launcher's folder, if there is a launcher."""
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
    except OSError:  # the launcher is gone, or its disk is full: keep the private page
        return


def page_of(failure_file: str, rank: int) -> str:
    """Return the path of a rank's status page."""
    return f"{failure_file}.at-{rank}"


def name_rank(who: str) -> None:
    """Write the rank's coordinates, given as "rank 3 (stage 1, tensor 0, data 0)"."""
    match = re.search(r"\((.*)\)", who)
    _write(0, match.group(1) if match else who)


def heartbeat_note(text: str) -> None:
    """Write the current operation of this rank; takes about a microsecond."""
    _write(1, text)


def note_state(state: str) -> None:
    """Write the state: ``RUNNING``, ``LATE``, ``IDLE``, ``REGROUP``, or "" once the run has ended."""
    _write(2, state)


def note_reporting() -> None:
    """Write the current time as the time of the error report."""
    _write(3, repr(time.monotonic()))


def heartbeat_now() -> str | None:
    """Return the last operation that this process has written, or None."""
    return own().doing or None


def own() -> Position:
    """Return the status of this process."""
    return read_position(bytes(_page))


def read_position(page: bytes) -> Position:
    """Parse the bytes of a page."""
    lines = (page[start:end].split(b"\0", 1)[0].decode(errors="replace") for start, end in pairwise(_BOUNDS))
    coordinates, doing, state, said_at = lines
    return Position(coordinates, doing, state, float(said_at or 0.0))


def _write(line: int, text: str) -> None:
    """Write ``text`` to a line of the page."""
    start, end = _BOUNDS[line : line + 2]
    length = end - start
    _page[start:end] = text.encode()[: length - 1].ljust(length, b"\0")
