"""Bytes of dataset files: mmap or pread readers, files that grow with a CRC, several replaced as one."""

from __future__ import annotations

import errno
import glob
import json
import os
import socket
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Protocol

import numpy as np

from megatron import files, log
from megatron.errors import DataError

# A file that grows piece by piece, with its size and crc32 known at any time.

_COPIED_AT_ONCE = 1 << 28
_READ_AT_ONCE = 1 << 20
_NO_COPY_IN_KERNEL = (errno.EXDEV, errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, errno.EBADF, errno.EPERM)


class StreamedFile:
    """Writes ``path`` from its beginning; ``size`` and ``crc32`` are those of all that was given so far."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.size = self.crc32 = 0
        files.before_operation("create", path)
        self._file = open(path, "wb")  # noqa: SIM115 - closed by close()

    def __enter__(self) -> StreamedFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def write(self, data: bytes | memoryview) -> None:
        """Append ``data``."""
        files.before_operation("write", self.path)
        self._file.write(data)
        self.size += memoryview(data).nbytes
        self.crc32 = zlib.crc32(data, self.crc32)

    def append_file(self, path: Path, num_bytes: int, crc32: int | None = None) -> None:
        """Append the file ``path`` of ``num_bytes``; with its ``crc32`` known, the kernel copies and nothing is read.

        Raises:
            DataError: the file has another size.
        """
        if path.stat().st_size != num_bytes:
            raise DataError(f"{path} must have {num_bytes} bytes, it has {path.stat().st_size}. Build it again.")
        with open(path, "rb", buffering=0) as source:
            if crc32 is None:
                self._read_and_write(source.fileno(), num_bytes)
                return
            self._file.flush()
            self._copy(source.fileno(), num_bytes)
        self.crc32 = files.crc32_combine(self.crc32, crc32, num_bytes)
        self.size += num_bytes

    def _copy(self, source: int, num_bytes: int) -> None:
        target, copied = self._file.fileno(), 0
        while copied < num_bytes:
            files.before_operation("copy", self.path)
            try:
                count = os.copy_file_range(source, target, min(_COPIED_AT_ONCE, num_bytes - copied), copied)
            except OSError as error:
                if error.errno not in _NO_COPY_IN_KERNEL:
                    raise
                count = os.write(target, os.pread(source, _READ_AT_ONCE, copied))
            if not count:
                raise DataError(f"{self.path}: a part of {num_bytes} bytes ended after {copied}; is it being changed?")
            copied += count

    def _read_and_write(self, source: int, num_bytes: int) -> None:
        left = num_bytes
        while left:
            data = os.read(source, min(_READ_AT_ONCE, left))
            if not data:
                raise DataError(f"{self.path}: a part of {num_bytes} bytes ended {left} early; is it being changed?")
            self.write(data)
            left -= len(data)

    def flush(self) -> None:
        """Hand all that was written to the system, for other processes to read."""
        self._file.flush()

    def sync(self) -> None:
        """Flush all that was written to the disk."""
        files.before_operation("fsync", self.path)
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


def read_sizes(path: Path, at_once: int = 1 << 18) -> Iterator[np.ndarray]:
    """Yield the int32 numbers in ``path``, the tokens of each document, in arrays of at most ``at_once``."""
    with open(path, "rb") as file:
        while data := file.read(4 * at_once):
            yield np.frombuffer(data, "<i4")


# Two ways to read a file's bytes at any place: from a mapping of it, or by ``pread``, for network file systems.
#
# | reader | a read is | what ends a file early under a running job |
# |---|---|---|
# | mmap | a copy out of shared pages | SIGBUS: the system kills the process, and Python cannot say why |
# | pread | one system call into own memory; tried again when it fails | an error that names file and place |
#
# Both may be used in processes forked after opening: neither has a position that they would share.

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


class MMapBinReader:
    """Reads through a mapping, which all processes of a host share."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.bytes = np.memmap(path, np.uint8, "r").view(np.ndarray) if path.stat().st_size else np.zeros(0, np.uint8)

    def read(self, offset: int, count: int) -> np.ndarray:
        return self.bytes[offset : offset + count].copy()


class FileBinReader:
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


READERS: dict[str, Callable[[Path], Reader]] = {"mmap": MMapBinReader, "pread": FileBinReader}


# Several files replaced as one: after a kill at any moment a reader finds all the old ones or all the new ones.
#
# 1. Each new file is written under a temporary name in the same folder and flushed.
# 2. A small journal ``PREFIX.commit`` with the pairs (temporary name, name) is put in place by one rename: the commit.
#    A pair (null, name) stands for a file to delete.
# 3. The renames in the journal are done, then the journal is deleted. Whoever finds a journal does the rest of them.


def temporary_path(path: Path) -> Path:
    """Return the name under which this process writes what becomes ``path``."""
    return path.with_name(f".{path.name}.{socket.gethostname()}-{os.getpid()}.tmp")


def replace_together(prefix: str, paths: Sequence[Path], gone: Sequence[Path] = ()) -> None:
    """Put the temporary files of ``paths``, all written and flushed, in place and delete ``gone``, as one change."""
    roll_forward(prefix)
    names = [[temporary_path(path).name, path.name] for path in paths] + [[None, path.name] for path in gone]
    journal = _journal(prefix)
    files.write_bytes(temporary_path(journal), json.dumps(names).encode())
    files.rename(temporary_path(journal), journal)
    roll_forward(prefix)


def is_pending(prefix: str) -> bool:
    """Return whether a committed replacement waits to be finished."""
    return _journal(prefix).exists()


def roll_forward(prefix: str) -> None:
    """Finish a replacement that was committed and then cut off; does nothing where there is none."""
    journal = _journal(prefix)
    try:
        names = json.loads(journal.read_bytes())
    except FileNotFoundError:
        return
    except ValueError as error:
        raise DataError(f"{journal} is damaged ({error}). Delete it and build {prefix} again.") from error
    try:
        for source, target in names:
            with suppress(FileNotFoundError):  # done already, by the one that was cut off or by another process
                if source is None:
                    files.remove_file(journal.with_name(target))
                else:
                    files.rename(journal.with_name(source), journal.with_name(target))
        files.before_operation("unlink", journal)
        journal.unlink(missing_ok=True)
    except OSError as error:
        if not isinstance(error, PermissionError) and error.errno != errno.EROFS:
            raise
        raise DataError(
            f"{journal}: a cut-off replacement of {prefix} must be finished; no permission: {error}"
        ) from error


def remove_stale(prefix: str) -> None:
    """Delete temporary files of processes of this machine that are no more."""
    opening = f".{socket.gethostname()}-"
    for suffix in (".bin", ".idx", ".len", ".meta.json", ".commit"):
        target = Path(prefix + suffix)
        for path in target.parent.glob(glob.escape(f".{target.name}{opening}") + "*.tmp"):
            number = path.name.removesuffix(".tmp").rpartition("-")[2]
            if Path("/proc/self").exists() and not Path(f"/proc/{number}").exists():
                path.unlink(missing_ok=True)


def _journal(prefix: str) -> Path:
    return Path(prefix + ".commit")
