"""One job at a time for one prefix."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from megatron import files, log
from megatron.data.preprocess.parts import LOCK
from megatron.errors import DataError
from megatron.file_lock import FileLock

PATIENCE_S = 2.0
"""The workers of a job that was killed end with it, but not at the same moment."""


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold ``folder``, made if it is not there, for this process and those it forks; an empty one is removed again.

    The lock ends with the last of these processes, however they end.

    Raises:
        DataError: another process holds it.
    """

    def refusal(holder: bytes) -> str:
        return (
            f"one job at a time may write {folder.with_suffix('')}; process "
            f"{holder.decode('ascii', 'replace').strip() or 'unknown'} does. "
            "Wait for it, end it, or give another --output-prefix."
        )

    def warn(error: OSError, _: bytes) -> bool:
        log.warning(f"{folder} cannot be locked ({error}): let no other job write the same --output-prefix")
        return True

    lock = FileLock(
        folder / LOCK, "flock", wait_s=lambda _: PATIENCE_S, describe=refusal, error=DataError, without_lock=warn
    )
    with suppress(OSError):  # the number is for the message of another job only: a full disk may refuse it
        lock.write(f"{os.getpid()}\n".encode())
    try:
        yield
    finally:
        _remove_if_empty(folder)
        lock.release(removes_file=False)


def _remove_if_empty(folder: Path) -> None:
    with suppress(OSError):
        if os.listdir(folder) == [LOCK]:
            files.remove_file(folder / LOCK)
            files.before_operation("remove_folder", folder)
            folder.rmdir()
