"""File I/O for token files: mmap and pread readers, streamed files with a CRC, atomic replacement of several files."""

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

# Streamed output with a running size and crc32.

_COPY_BYTES = 1 << 28
_READ_BYTES = 1 << 20
_COPY_UNSUPPORTED_ERRNOS = (errno.EXDEV, errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, errno.EBADF, errno.EPERM)


class StreamedFile:
    """An output file at ``path``; ``size`` and ``crc32`` cover everything written so far."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.size = self.crc32 = 0
        files.before_operation("create", path)
        self._file = open(path, "wb")  # noqa: SIM115 - closed by close()

    def __enter__(self) -> StreamedFile:
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def write(self, data: bytes | memoryview) -> None:
        """Append ``data``."""
        files.before_operation("write", self.path)
        self._file.write(data)
        self.size += memoryview(data).nbytes
        self.crc32 = zlib.crc32(data, self.crc32)

    def append_file(self, path: Path, num_bytes: int, crc32: int | None = None) -> None:
        """Append the file ``path``, which has ``num_bytes`` bytes.

        If its ``crc32`` is given, the kernel copies the data; otherwise the data is read to compute the checksum.

        Raises:
            DataError: the file size is not ``num_bytes``.
        """
        if path.stat().st_size != num_bytes:
            raise DataError(f"{path} must have {num_bytes} bytes, but has {path.stat().st_size}. Build it again.")
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
                num_copied = os.copy_file_range(source, target, min(_COPY_BYTES, num_bytes - copied), copied)
            except OSError as error:
                if error.errno not in _COPY_UNSUPPORTED_ERRNOS:
                    raise
                num_copied = os.write(target, os.pread(source, _READ_BYTES, copied))
            if not num_copied:
                raise DataError(
                    f"{self.path}: an input of {num_bytes} bytes ended after {copied} bytes; it may be changing"
                )
            copied += num_copied

    def _read_and_write(self, source: int, num_bytes: int) -> None:
        remaining = num_bytes
        while remaining:
            data = os.read(source, min(_READ_BYTES, remaining))
            if not data:
                raise DataError(
                    f"{self.path}: an input of {num_bytes} bytes ended {remaining} bytes early; it may be changing"
                )
            self.write(data)
            remaining -= len(data)

    def flush(self) -> None:
        """Flush the write buffer, so that other processes can read the data."""
        self._file.flush()

    def sync(self) -> None:
        """Flush all written data to the disk."""
        files.before_operation("fsync", self.path)
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


def read_lengths(path: Path, block_documents: int = 1 << 18) -> Iterator[np.ndarray]:
    """Read the int32 tokens per document in ``path``, in arrays with at most ``block_documents`` entries."""
    with open(path, "rb") as file:
        while data := file.read(4 * block_documents):
            yield np.frombuffer(data, "<i4")


# Random access to a file by memory mapping, or by ``pread`` for network file systems.
#
# | reader | read | if the file is truncated during the job |
# |---|---|---|
# | mmap | copy from shared pages | SIGBUS kills the process without a Python error |
# | pread | one system call into private memory, retried on failure | an error that names the file and the position |
#
# Both readers may be used in processes forked after opening, because they have no file position to share.

RETRY_DELAYS_S = (0.1, 1.0, 5.0)
"""Delays before the retries of a failed ``pread``."""


class Reader(Protocol):
    """A file opened for reading."""

    def read(self, offset: int, count: int) -> np.ndarray:
        """Copy bytes ``offset`` ... ``offset + count - 1`` as uint8.

        Raises:
            DataError: the bytes cannot be read.
        """
        ...


class MMapBinReader:
    """Reader that uses a memory mapping, which all processes on a host share."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.bytes = np.memmap(path, np.uint8, "r").view(np.ndarray) if path.stat().st_size else np.zeros(0, np.uint8)

    def read(self, offset: int, count: int) -> np.ndarray:
        return self.bytes[offset : offset + count].copy()


class FileBinReader:
    """Reader that uses ``pread``. It continues short reads, and reopens the file and retries after an error."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def __del__(self) -> None:
        if hasattr(self, "_descriptor"):
            os.close(self._descriptor)

    def read(self, offset: int, count: int) -> np.ndarray:
        buffer = np.empty(count, np.uint8)
        view, filled, delays = buffer.data, 0, iter(RETRY_DELAYS_S)
        while filled < count:
            try:
                count_read = os.preadv(self._descriptor, [view[filled:]], offset + filled)
            except OSError as error:
                self._wait_and_reopen(error, offset + filled, next(delays, None))
                continue
            if not count_read:
                raise DataError(
                    f"{self.path} ends at byte {offset + filled}, but bytes {offset}:{offset + count} were requested. "
                    "It was truncated after the job started. Restore the file and resume."
                )
            filled += count_read
        return buffer

    def _wait_and_reopen(self, error: OSError, offset: int, delay_s: float | None) -> None:
        if delay_s is None:
            raise DataError(
                f"{self.path}: byte {offset} cannot be read after {1 + len(RETRY_DELAYS_S)} attempts: {error}. Check "
                "the file system, then resume."
            ) from error
        log.warning(f"{self.path}: reading byte {offset} failed ({error}); retrying in {delay_s} s")
        time.sleep(delay_s)
        try:
            descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return  # the next attempt uses the old descriptor, which may still work
        os.close(self._descriptor)
        self._descriptor = descriptor


READERS: dict[str, Callable[[Path], Reader]] = {"mmap": MMapBinReader, "pread": FileBinReader}


# Atomic replacement of several files: if the process is killed at any time, readers see all old or all new files.
#
# 1. Each new file is written under a temporary name in the same folder and flushed.
# 2. A small journal ``PREFIX.commit`` with the pairs (temporary name, name) is created by one rename, the commit. A
#    pair (null, name) denotes a file to delete.
# 3. The renames in the journal are executed, then the journal is deleted. A process that finds a journal executes the
#    remaining renames.


def temporary_path(path: Path) -> Path:
    """Choose the temporary name under which this process writes the future file ``path``."""
    return path.with_name(f".{path.name}.{socket.gethostname()}-{os.getpid()}.tmp")


def replace_together(prefix: str, paths: Sequence[Path], obsolete: Sequence[Path] = ()) -> None:
    """Atomically rename the temporary files of ``paths``, all written and flushed, and delete ``obsolete``."""
    roll_forward(prefix)
    names = [[temporary_path(path).name, path.name] for path in paths] + [[None, path.name] for path in obsolete]
    journal = _journal_path(prefix)
    files.write_bytes(temporary_path(journal), json.dumps(names).encode())
    files.rename(temporary_path(journal), journal)
    roll_forward(prefix)


def is_pending(prefix: str) -> bool:
    """Return True if a replacement was committed but not finished."""
    return _journal_path(prefix).exists()


def roll_forward(prefix: str) -> None:
    """Finish an interrupted replacement that was already committed, if there is one."""
    journal = _journal_path(prefix)
    try:
        names = json.loads(journal.read_bytes())
    except FileNotFoundError:
        return
    except ValueError as error:
        raise DataError(f"{journal} is damaged ({error}). Delete it and build {prefix} again.") from error
    try:
        for source, target in names:
            with suppress(FileNotFoundError):  # already done by the interrupted process or by another one
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
            f"{journal}: an interrupted replacement of {prefix} must be finished, but permission is denied: {error}"
        ) from error


def remove_stale(prefix: str) -> None:
    """Delete temporary files that terminated processes on this machine have left."""
    host_infix = f".{socket.gethostname()}-"
    for suffix in (".bin", ".idx", ".len", ".meta.json", ".commit"):
        target = Path(prefix + suffix)
        for path in target.parent.glob(glob.escape(f".{target.name}{host_infix}") + "*.tmp"):
            pid = path.name.removesuffix(".tmp").rpartition("-")[2]
            if Path("/proc/self").exists() and not Path(f"/proc/{pid}").exists():
                path.unlink(missing_ok=True)


def _journal_path(prefix: str) -> Path:
    return Path(prefix + ".commit")
