"""A file that grows piece by piece, with its size and crc32 known at any time."""

from __future__ import annotations

import errno
import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

import numpy as np

from megatron import files
from megatron.errors import DataError

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
