"""File operations for checkpoints, token files and run folders.

All files that must survive a kill at any time are written through these few functions. A test replaces
``before_operation`` and kills the process before the k-th operation, for every k.
"""

from __future__ import annotations

import os
import resource
import shutil
import zlib
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import BinaryIO

_BUFFER_BYTES = 1 << 20
_CRC_POLYNOMIAL = 0xEDB88320  # without x^32; the highest bit of an int is the coefficient of x^0, as in zlib
_ONE, _X = 1 << 31, 1 << 30


def _no_op(operation: str, path: Path) -> None:
    return None


before_operation: Callable[[str, Path], None] = _no_op
"""Called before each operation with its name and path; tests inject crashes and full disks here."""


def write_bytes(path: Path, data: bytes | memoryview) -> None:
    """Write ``data`` to ``path`` and flush it to disk. A kill may leave an incomplete file."""
    before_operation("write", path)
    with open(path, "wb") as file:
        file.write(data)
        before_operation("fsync", path)
        file.flush()
        os.fsync(file.fileno())


def write_chunks(path: Path, chunks: Iterable[bytes | memoryview]) -> tuple[int, int]:
    """Write ``chunks`` to ``path`` and flush to disk; the result is (size in bytes, crc32).

    A second thread computes a chunk's checksum while the first thread writes it.
    """
    size = crc = 0
    before_operation("create", path)
    with open(path, "wb") as file, ThreadPoolExecutor(1) as executor:
        for chunk in chunks:
            before_operation("write", path)
            crc_future = executor.submit(zlib.crc32, chunk, crc)
            size += file.write(chunk)
            crc = crc_future.result()
        before_operation("fsync", path)
        file.flush()
        os.fsync(file.fileno())
    return size, crc


class Stream:
    """A file being written. It buffers small writes and keeps track of the size and checksum."""

    def __init__(self, file: BinaryIO, path: Path) -> None:
        self.size = self.crc = 0
        self.error: OSError | None = None
        self._file, self._path, self._buffered = file, path, bytearray()

    def write(self, data: bytes | memoryview) -> int:
        """Write or buffer ``data``; return its length."""
        if len(self._buffered) + len(data) > _BUFFER_BYTES:
            self.flush()
        if len(data) > _BUFFER_BYTES:
            self._write(data)
        else:
            self._buffered += data
        return len(data)

    def flush(self) -> None:
        """Write the buffered data."""
        buffered, self._buffered = self._buffered, bytearray()
        if buffered:
            self._write(buffered)

    def _write(self, data: bytes | bytearray | memoryview) -> None:
        try:
            before_operation("write", self._path)
            self._file.write(data)
        except OSError as error:
            self.error = self.error or error
            raise
        self.size += len(data)
        self.crc = zlib.crc32(data, self.crc)


def write_with(path: Path, produce: Callable[[Stream], None]) -> tuple[int, int]:
    """Call ``produce`` to write to ``path``, and flush to disk; the result is (size in bytes, crc32).

    Raises:
        OSError: the original disk error, even if ``produce`` converted it, as ``torch.save`` does.
    """
    before_operation("create", path)
    with open(path, "wb") as file:
        stream = Stream(file, path)
        try:
            produce(stream)
            stream.flush()
        except Exception:
            if stream.error is not None:
                raise stream.error from None
            raise
        before_operation("fsync", path)
        file.flush()
        os.fsync(file.fileno())
    return stream.size, stream.crc


def size_and_crc(path: Path, chunk_bytes: int = 1 << 22) -> tuple[int, int]:
    """Read the whole file ``path`` and return (size in bytes, crc32)."""
    size = crc = 0
    buffer = memoryview(bytearray(chunk_bytes))
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(buffer):
            crc = zlib.crc32(buffer[:count], crc)
            size += count
    return size, crc


def segment_crc(path: Path, start: int, stop: int, chunk_bytes: int = 1 << 20) -> int:
    """Compute the crc32 of the bytes ``start`` to ``stop`` in ``path``, or to its end if the file is shorter."""
    crc = 0
    buffer = memoryview(bytearray(min(chunk_bytes, stop - start)))
    with open(path, "rb", buffering=0) as file:
        file.seek(start)
        while start < stop and (count := file.readinto(buffer[: stop - start])):
            crc = zlib.crc32(buffer[:count], crc)
            start += count
    return crc


def crc32_combine(first: int, second: int, second_bytes: int) -> int:
    """Compute the crc32 of the concatenation A + B from both checksums and the byte count of B.

    A CRC-32 is the remainder of a polynomial over {0, 1}. Appending n bytes multiplies the polynomial by x^(8 n).

    Source: Peterson and Brown 1961, "Cyclic codes for error detection"; IEEE 802.3 (the polynomial); Mark Adler's
    note in zlib's crc32_combine.
    """
    return _gf2_multiply(first, _x_power(8 * second_bytes)) ^ second


def _gf2_multiply(a: int, b: int) -> int:
    product = 0
    while a:
        if a & _ONE:
            product ^= b
        a = a << 1 & 0xFFFFFFFF
        b = b >> 1 ^ (_CRC_POLYNOMIAL if b & 1 else 0)  # times x
    return product


@cache
def _x_power(power: int) -> int:
    result, square = _ONE, _X
    while power:
        if power & 1:
            result = _gf2_multiply(result, square)
        square = _gf2_multiply(square, square)
        power >>= 1
    return result


def make_folder(folder: Path) -> None:
    """Create ``folder`` and its missing parents."""
    before_operation("make_folder", folder)
    folder.mkdir(parents=True, exist_ok=True)


def remove_tree(folder: Path) -> None:
    """Delete ``folder`` and its contents, one entry at a time; a kill leaves a partly deleted folder."""
    for child in sorted(folder.iterdir()):
        if child.is_dir() and not child.is_symlink():
            remove_tree(child)
        else:
            remove_file(child)
    before_operation("remove_folder", folder)
    folder.rmdir()


def remove_file(path: Path) -> None:
    """Delete the file ``path``."""
    before_operation("remove", path)
    path.unlink()


def free_bytes(folder: Path) -> int:
    """Measure the free bytes on the file system of ``folder``."""
    return shutil.disk_usage(folder).free


def too_large_message() -> str:
    """Describe a "file too large" error (EFBIG): the limit that was exceeded, and how to raise it."""
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    if limit == resource.RLIM_INFINITY:
        return "larger than this file system allows. Write to another one"
    return f"larger than the limit of `ulimit -f`, {limit:,} bytes. Raise the limit (ulimit -f unlimited)"


def allow_open_files(num_files: int) -> int:
    """Raise this process's limit on open files and sockets to ``num_files`` if permitted; return the new limit."""
    soft_limit, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = num_files if hard_limit == resource.RLIM_INFINITY else min(num_files, hard_limit)
    if soft_limit != resource.RLIM_INFINITY and soft_limit < allowed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard_limit))
    return num_files if soft_limit == resource.RLIM_INFINITY else max(soft_limit, allowed)


def rename(source: Path, target: Path) -> None:
    """Rename ``source`` to ``target`` atomically and flush the folder. This is the commit of the save protocols."""
    before_operation("rename", target)
    os.replace(source, target)
    sync_folder(target.parent)


def replace_bytes(path: Path, data: bytes) -> None:
    """Write ``data`` to a temporary file and rename it to ``path``, so that readers never see a partial file."""
    temporary = path.with_name(f".{path.name}.tmp-{os.getpid()}")
    try:
        write_bytes(temporary, data)
        rename(temporary, path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise


def sync_folder(folder: Path) -> None:
    """Flush the entries of ``folder`` to disk."""
    before_operation("sync_folder", folder)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
