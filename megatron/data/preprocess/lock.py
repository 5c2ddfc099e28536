"""One job at a time for one prefix."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from megatron import files, log
from megatron.data.preprocess.parts import LOCK
from megatron.errors import DataError

PATIENCE_S = 2.0
"""The workers of a job that was killed end with it, but not at the same moment."""


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold ``folder``, made if it is not there, for this process and those it forks; an empty one is removed again.

    The lock ends with the last of these processes, however they end.

    Raises:
        DataError: another process holds it.
    """
    descriptor = _lock(folder)
    try:
        yield
    finally:
        _remove_if_empty(folder)
        os.close(descriptor)


def _lock(folder: Path) -> int:
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
        except FileNotFoundError:  # another job has just ended and removed the folder
            continue
        _flock(descriptor, folder)
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(descriptor), os.stat(folder / LOCK)):
                _tell_holder(descriptor)
                return descriptor
        os.close(descriptor)  # what was locked has been removed meanwhile


def _tell_holder(descriptor: int) -> None:
    """Write the number of this process, for the message of another job only: a full disk may refuse it."""
    with suppress(OSError):
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)


def _flock(descriptor: int, folder: Path) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            if time.monotonic() < deadline:
                time.sleep(0.02)
                continue
            holder = os.pread(descriptor, 20, 0).decode("ascii", "replace").strip() or "unknown"
            os.close(descriptor)
            raise DataError(
                f"one job at a time may write {folder.with_suffix('')}; process {holder} does. "
                "Wait for it, end it, or give another --output-prefix."
            ) from error
        except OSError as error:
            return log.warning(f"{folder} cannot be locked ({error}): let no other job write the same --output-prefix")


def _remove_if_empty(folder: Path) -> None:
    with suppress(OSError):
        if os.listdir(folder) == [LOCK]:
            files.remove_file(folder / LOCK)
            files.before_operation("remove_folder", folder)
            folder.rmdir()
