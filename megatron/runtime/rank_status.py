"""Status file of a rank: its current step and operation, readable by the launcher.

The file is memory-mapped and located in the launcher's folder, so it survives a SIGKILL of the rank. Its path consists
of MEGATRON_FAILURE_FILE and the rank. Without our launcher, the status is stored in private memory.

| line of the file | content |
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

BUFFER_BYTES = 512
RUNNING, LATE, IDLE, REGROUP = "running", "late", "idle", "regroup"
_BOUNDS = (0, 96, 480, 488, BUFFER_BYTES)
_buffer: mmap.mmap | bytearray = bytearray(BUFFER_BYTES)


class RankStatus(NamedTuple):
    """The lines of a status file; empty if nothing was written."""

    coordinates: str = ""
    operation: str = ""
    state: str = ""
    reported_at: float = 0.0

    @property
    def is_running(self) -> bool:
        """True between the start of the rank's run and its end, error or stop."""
        return bool(self.state)


def open_status_file() -> None:
    """Create the status file in the launcher's folder and map it into memory; no-op without our launcher."""
    global _buffer
    failure_file = os.environ.get("MEGATRON_FAILURE_FILE")
    if not failure_file:
        return
    try:
        descriptor = os.open(status_path(failure_file, int(os.environ.get("RANK", "0"))), os.O_CREAT | os.O_RDWR, 0o600)
        try:
            os.ftruncate(descriptor, BUFFER_BYTES)
            _buffer = mmap.mmap(descriptor, BUFFER_BYTES)
        finally:
            os.close(descriptor)
    except OSError:  # the launcher is gone, or its disk is full: keep the private memory
        return


def use_private_memory() -> None:
    """Stop writing to the status file. Called in child processes of a rank, which inherit the mapping."""
    global _buffer
    _buffer = bytearray(BUFFER_BYTES)


def status_path(failure_file: str, rank: int) -> str:
    """Return the path of a rank's status file."""
    return f"{failure_file}.at-{rank}"


def write_coordinates(rank_name: str) -> None:
    """Write the rank's coordinates, given as "rank 3 (stage 1, tensor 0, data 0)"."""
    match = re.search(r"\((.*)\)", rank_name)
    _write_line(0, match.group(1) if match else rank_name)


def write_operation(text: str) -> None:
    """Write the current operation of this rank; takes about a microsecond."""
    _write_line(1, text)


def write_state(state: str) -> None:
    """Write the state: ``RUNNING``, ``LATE``, ``IDLE``, ``REGROUP``, or "" once the run has ended."""
    _write_line(2, state)


def write_report_time() -> None:
    """Write the current time as the time of the error report."""
    _write_line(3, repr(time.monotonic()))


def current_operation() -> str | None:
    """Return the last operation that this process has written, or None."""
    return current_status().operation or None


def current_status() -> RankStatus:
    """Return the status of this process."""
    return parse_status(bytes(_buffer))


def parse_status(status_bytes: bytes) -> RankStatus:
    """Parse the bytes of a status file."""
    lines = (status_bytes[start:end].split(b"\0", 1)[0].decode(errors="replace") for start, end in pairwise(_BOUNDS))
    coordinates, operation, state, reported_at = lines
    return RankStatus(coordinates, operation, state, float(reported_at or 0.0))


def _write_line(line: int, text: str) -> None:
    start, end = _BOUNDS[line : line + 2]
    length = end - start
    _buffer[start:end] = text.encode()[: length - 1].ljust(length, b"\0")
