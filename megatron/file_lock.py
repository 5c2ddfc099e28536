"""Kernel lock on a file for mutual exclusion between jobs; the file's text identifies the holder."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Literal

POLL_S = 0.05


class FileLock:
    """Holds a lock on ``path`` from construction until ``release`` or the end of its owner.

    The file and its folder are created if they are missing.

    | lock_type | owner |
    |---|---|
    | lockf | this process only. The lock is lost if this process opens the file again and closes it |
    | flock | this process and the processes that it forks, until the last of them ends |

    The kernel releases the lock when its owner ends for any reason, so an unlocked file is stale and is taken over.
    ``previous_text`` is the text that an earlier holder left in the file, or b"".

    Args:
        wait_s: maps the holder's text to the wait in seconds.
        describe: maps the holder's text to the error message.
        error: exception type to raise with that message.
        poll_s: seconds between two attempts to lock.
        without_lock: called with the reason and the file's text if the file system cannot lock the file; returns True
            to continue without a lock. Otherwise the lock counts as held by another process.

    Raises:
        error: another process holds the lock.
        OSError: the file cannot be opened.
    """

    def __init__(
        self,
        path: Path,
        lock_type: Literal["lockf", "flock"],
        *,
        wait_s: Callable[[bytes], float],
        describe: Callable[[bytes], str],
        error: type[Exception],
        without_lock: Callable[[OSError, bytes], bool],
        poll_s: float = POLL_S,
    ) -> None:
        self.path, self.previous_text = path, b""
        self._lock_type, self._without_lock = lock_type, without_lock
        self._descriptor: int | None = None
        start = time.monotonic()
        while self._descriptor is None:
            holder = self._try_acquire()
            if holder is None:
                continue
            if time.monotonic() - start >= wait_s(holder):
                raise error(describe(holder))
            time.sleep(poll_s)

    @property
    def descriptor(self) -> int:
        """The locked file's descriptor. A process that inherits it holds a "flock" lock after this one releases it."""
        assert self._descriptor is not None, "the lock was released"
        return self._descriptor

    def write(self, text: bytes) -> None:
        """Write ``text``, which identifies the holder, to the file."""
        assert self._descriptor is not None
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, text, 0)

    def release(self, *, removes_file: bool = True) -> None:
        """Release the lock. A second call does nothing."""
        if self._descriptor is not None:
            if removes_file:
                with suppress(OSError):
                    self.path.unlink()
            os.close(self._descriptor)
            self._descriptor = None

    def _try_acquire(self) -> bytes | None:
        """Try once to acquire the lock; return None, or the holder's text if another process holds it.

        If the file has just been removed, the result is also None, but the lock is not acquired.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        try:
            descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
        except FileNotFoundError:  # a holder has just removed the folder
            if self.path.is_symlink():
                raise
            return None
        try:
            problem = self._lock(descriptor)
            if not isinstance(problem, BlockingIOError) and not _is_file(descriptor, self.path):
                return None
            text = os.pread(descriptor, 4096, 0)
            if problem is not None and (isinstance(problem, BlockingIOError) or not self._without_lock(problem, text)):
                return text
            self.previous_text, self._descriptor = text, descriptor
            return None
        finally:
            if self._descriptor is None:
                os.close(descriptor)

    def _lock(self, descriptor: int) -> OSError | None:
        """Lock the open file; return the error if that fails."""
        try:
            getattr(fcntl, self._lock_type)(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as problem:
            return problem
        return None


def _is_file(descriptor: int, path: Path) -> bool:
    """Return True if ``path`` still is the open file. A holder removes the file when it releases the lock."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except OSError:
        return False
