"""Files through which the launcher of a node and its ranks report failures to each other.

The suffixes are appended to the path of the failure file.

| file | written by | content |
|---|---|---|
| the failure file | the launcher, before its SIGTERM | the rank that died; without it, SIGTERM is a request to save |
| ``.asked`` | the launcher, before a SIGTERM that requests a save | the signal that it has received |
| ``.words-R`` | rank R | an error that all ranks raise; only rank 0 prints it |
| ``.said`` | a rank that has printed why the job ends | empty; the launcher does not report it again |
| ``.traceback`` | the first rank with an unexpected exception | empty; only one traceback is printed |
| ``.trace-R`` | rank R | the trace of a crash in native code |

MEGATRON_FAILURE_FILE is the path of the failure file. Without our launcher there are no files, and the ranks print
everything themselves.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


def peer_failure() -> str | None:
    """Return the launcher's message about a dead peer, or None."""
    failure_file = os.environ.get("MEGATRON_FAILURE_FILE")
    return (_read_text(failure_file).strip() or None) if failure_file else None


def forwarded_signal() -> str | None:
    """Return the name of the signal that the launcher has forwarded as SIGTERM, or None."""
    failure_file = os.environ.get("MEGATRON_FAILURE_FILE")
    return (_read_text(f"{failure_file}.asked") or None) if failure_file else None


def write_forwarded_signal(failure_file: str, signal_name: str) -> None:
    """Record the signal that the launcher forwards as SIGTERM."""
    with suppress(OSError):  # if the disk is full, the ranks report SIGTERM
        Path(f"{failure_file}.asked").write_text(signal_name)


def trace_path(failure_file: str, rank: int) -> str:
    """Return the path of this rank's trace after a crash."""
    return f"{failure_file}.trace-{rank}"


def write_common_error(text: str, rank: int) -> None:
    """Write an error that all ranks raise, in case rank 0 is killed before it prints the error."""
    failure_file = os.environ.get("MEGATRON_FAILURE_FILE")
    if failure_file:
        with suppress(OSError):  # the launcher is gone, or its disk is full
            Path(f"{failure_file}.words-{rank}").write_text(text)


def mark_reported() -> None:
    """Record that this rank has printed why the job ends, so that the launcher does not report it again."""
    failure_file = os.environ.get("MEGATRON_FAILURE_FILE")
    if failure_file:
        with suppress(OSError):
            Path(f"{failure_file}.said").touch()


def read_common_error(failure_file: str, rank: int) -> str:
    """Return the error that ``rank`` has written with ``write_common_error``, or ""."""
    return _read_text(f"{failure_file}.words-{rank}")


def is_reported(failure_file: str) -> bool:
    """Return True if a rank of this node has printed why the job ends."""
    return Path(f"{failure_file}.said").exists()


def claim_traceback() -> bool:
    """Return True if this rank is the first on its node to print a traceback.

    The tracebacks of the other ranks are usually the same and are omitted.
    """
    failure_file = os.environ.get("MEGATRON_FAILURE_FILE")
    if not failure_file:
        return True
    try:
        os.close(os.open(f"{failure_file}.traceback", os.O_CREAT | os.O_EXCL))
        return True
    except FileExistsError:
        return False
    except OSError:
        return True


def _read_text(path: str) -> str:
    """Read a file, or return "" if it cannot be read."""
    try:
        return Path(path).read_text()
    except OSError:
        return ""
