"""One job at a time: a lock of the kernel on a file, whose text says who holds it."""

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
    """Holds ``path``, made with its folder if it is not there, from construction to ``release`` or its owner's end.

    | kind | owner |
    |---|---|
    | lockf | this process alone. Whoever opens the file once more in it and closes it gives the lock away |
    | flock | this process and those it forks, until the last of them ends |

    The lock ends with its owner, however that ends, so a file that nobody locks is stale and is taken over. ``left``
    is what an earlier holder has left in it, b"" where there was none.

    Args:
        wait_s: seconds to wait for a holder that has written so.
        describe: the message about a holder that has written so.
        error: what is raised with that message.
        poll_s: seconds between looks at a lock that is held.
        without_lock: asked where the file cannot be locked, with the reason and what is written in it; whether to go
            on all the same. Where not, that counts as held.

    Raises:
        error: another one holds it.
        OSError: the file cannot be opened.
    """

    def __init__(
        self,
        path: Path,
        kind: Literal["lockf", "flock"],
        *,
        wait_s: Callable[[bytes], float],
        describe: Callable[[bytes], str],
        error: type[Exception],
        without_lock: Callable[[OSError, bytes], bool],
        poll_s: float = POLL_S,
    ) -> None:
        self.path, self.left = path, b""
        self._kind, self._without_lock = kind, without_lock
        self._descriptor: int | None = None
        began = time.monotonic()
        while self._descriptor is None:
            holder = self._try()
            if holder is None:
                continue
            if time.monotonic() - began >= wait_s(holder):
                raise error(describe(holder))
            time.sleep(poll_s)

    def write(self, text: bytes) -> None:
        """Write ``text``, who the holder is, into the file."""
        assert self._descriptor is not None
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, text, 0)

    def release(self, *, removes_file: bool = True) -> None:
        """Let it go; a second call does nothing."""
        if self._descriptor is not None:
            if removes_file:
                with suppress(OSError):
                    self.path.unlink()
            os.close(self._descriptor)
            self._descriptor = None

    def _try(self) -> bytes | None:
        """Take the lock, or return what its holder has written; neither, if its file has just been removed."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        try:
            descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
        except FileNotFoundError:  # a holder has just ended and removed the folder
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
            self.left, self._descriptor = text, descriptor
            return None
        finally:
            if self._descriptor is None:
                os.close(descriptor)

    def _lock(self, descriptor: int) -> OSError | None:
        """Lock the open file; return why it cannot be."""
        try:
            getattr(fcntl, self._kind)(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as problem:
            return problem
        return None


def _is_file(descriptor: int, path: Path) -> bool:
    """Whether ``path`` is the open file still: its holder removes it as it leaves."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except OSError:
        return False
