"""Two ways to read a file's bytes at any place: from a mapping of it, or by ``pread``, for network file systems.

| reader | a read is | what ends a file early under a running job |
|---|---|---|
| mmap | a copy out of shared pages | SIGBUS: the system kills the process, and Python cannot say why |
| pread | one system call into own memory; tried again when it fails | an error that names file and place |

Both may be used in processes forked after opening: neither has a position that they would share.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import numpy as np

from megatron import log
from megatron.errors import DataError

PAUSES_S = (0.1, 1.0, 5.0)
"""Pauses before the further attempts of a ``pread`` that failed."""


class Reader(Protocol):
    """A file that is open for reading."""

    def read(self, offset: int, count: int) -> np.ndarray:
        """Return bytes ``offset`` ... ``offset + count - 1`` as uint8, in memory of their own.

        Raises:
            DataError: they cannot be read.
        """
        ...


class MappedReader:
    """Reads through a mapping, which all processes of a host share."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.bytes = np.memmap(path, np.uint8, "r").view(np.ndarray) if path.stat().st_size else np.zeros(0, np.uint8)

    def read(self, offset: int, count: int) -> np.ndarray:
        return self.bytes[offset : offset + count].copy()


class PreadReader:
    """Reads by ``pread``; short reads go on, and errors are tried again on the file opened anew."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def __del__(self) -> None:
        if hasattr(self, "_descriptor"):
            os.close(self._descriptor)

    def read(self, offset: int, count: int) -> np.ndarray:
        buffer = np.empty(count, np.uint8)
        view, filled, pauses = buffer.data, 0, iter(PAUSES_S)
        while filled < count:
            try:
                got = os.preadv(self._descriptor, [view[filled:]], offset + filled)
            except OSError as error:
                self._try_again(error, offset + filled, next(pauses, None))
                continue
            if not got:
                raise DataError(
                    f"{self.path} ends at byte {offset + filled}, bytes {offset}:{offset + count} were asked for. It "
                    "was cut short since the job started: put the whole file back and resume."
                )
            filled += got
        return buffer

    def _try_again(self, error: OSError, place: int, pause_s: float | None) -> None:
        if pause_s is None:
            raise DataError(
                f"{self.path}: byte {place} cannot be read after {1 + len(PAUSES_S)} attempts: {error}. Look at the "
                "file system, then resume."
            ) from error
        log.warning(f"{self.path}: reading byte {place} failed ({error}); trying again in {pause_s} s")
        time.sleep(pause_s)
        try:
            descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return  # the old one may still serve the next attempt, which counts
        os.close(self._descriptor)
        self._descriptor = descriptor


READERS: dict[str, Callable[[Path], Reader]] = {"mmap": MappedReader, "pread": PreadReader}
