"""Files through which the launcher of a node and its ranks report a failure to each other.

| file | written by | holds |
|---|---|---|
| the failure file | the launcher, ahead of its SIGTERM | who died; a SIGTERM without it is a request to save |
| ``.asked`` beside it | the launcher, ahead of a SIGTERM that asks to save | the signal that it has itself received |
| ``.words-R`` beside it | rank R | an error that all ranks raise alike; rank 0 alone prints it |
| ``.said`` | who has printed why the job ends | nothing: the launcher need not say it again |
| ``.traceback`` | the first rank with a defect | nothing: one traceback is enough |
| ``.trace-R`` | rank R | the trace of a crash in native code |

MEGATRON_FAILURE_FILE names the first one; without our launcher there are none, and the ranks print all they know.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


def peer_failure() -> str | None:
    """Return what the launcher has written of a dead peer, or None while all live."""
    place = os.environ.get("MEGATRON_FAILURE_FILE")
    return (_read(place).strip() or None) if place else None


def asked_through_launcher() -> str | None:
    """Return the name of the signal that the launcher has passed on as SIGTERM, or None."""
    place = os.environ.get("MEGATRON_FAILURE_FILE")
    return (_read(f"{place}.asked") or None) if place else None


def note_asked(failure_file: str, signal_name: str) -> None:
    """Leave the name of the signal that the launcher passes on as SIGTERM."""
    with suppress(OSError):  # its disk is full: the ranks say SIGTERM
        Path(f"{failure_file}.asked").write_text(signal_name)


def trace_of(failure_file: str, rank: int) -> str:
    """Return the path of what a crash of this rank leaves."""
    return f"{failure_file}.trace-{rank}"


def leave_words(words: str, rank: int) -> None:
    """Leave what this rank raised like all others, in case that rank 0 does not come to print it."""
    place = os.environ.get("MEGATRON_FAILURE_FILE")
    if place:
        with suppress(OSError):  # the launcher is gone, or its disk is full
            Path(f"{place}.words-{rank}").write_text(words)


def note_reported() -> None:
    """Note that this rank has printed why the job ends."""
    place = os.environ.get("MEGATRON_FAILURE_FILE")
    if place:
        with suppress(OSError):
            Path(f"{place}.said").touch()


def words_of(failure_file: str, rank: int) -> str:
    """Return the error that this rank raised like all others, or ""."""
    return _read(f"{failure_file}.words-{rank}")


def is_reported(failure_file: str) -> bool:
    """Return whether a rank of this node has printed why the job ends."""
    return Path(f"{failure_file}.said").exists()


def is_first_to_report() -> bool:
    """Return whether no other rank of this node has shown its traceback: the same one from each says nothing new."""
    place = os.environ.get("MEGATRON_FAILURE_FILE")
    if not place:
        return True
    try:
        os.close(os.open(f"{place}.traceback", os.O_CREAT | os.O_EXCL))
        return True
    except FileExistsError:
        return False
    except OSError:
        return True


def _read(place: str) -> str:
    try:
        return Path(place).read_text()
    except OSError:
        return ""
