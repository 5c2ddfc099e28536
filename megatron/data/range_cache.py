"""Read token files from object stores in blocks, with a disk cache that all processes on this host share.

| path in the cache folder | content |
|---|---|
| ``<object>/00000003.block`` | one block from an object, followed by the block's crc32 |
| ``<object>/whole`` | a copy of a complete object (an index); ``whole.crc32`` contains its checksum |
| ``used`` | total bytes in these files; a process that adds a file locks it and evicts the least recently used files |

``<object>`` is a digest of the object's name, size and version, so a modified object has another folder. Files
are created by a rename, so they are never incomplete. A process verifies a file's checksum on its first read; a
file with a wrong checksum is fetched again.
"""

from __future__ import annotations

import hashlib
import math
import os
import threading
import time
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np

from megatron import files, log, object_store
from megatron.errors import DataError
from megatron.file_lock import FileLock

BLOCK_BYTES = 1 << 18
"""Bytes of a block. Documents are read in random order, so most of a larger block would not be used."""

DEFAULT_BYTES = 16 * 10**9
NUM_THREADS = 16
"""Concurrent requests of each process that reads an object."""

_STALE_S = 3600.0
_MAX_PENDING_WRITES = 1024
"""Maximum number of blocks that the processes of a host write concurrently."""

_MAX_PENDING_RANGES = 1 << 14
_NUM_LOCKS = 64
_EVICTION_TARGET = 0.9
_POLL_S = 0.01
_thread_lock = threading.RLock()


def _renew_lock() -> None:
    global _thread_lock
    _thread_lock = threading.RLock()  # a thread of the parent process may have held the old lock during the fork


os.register_at_fork(after_in_child=_renew_lock)


class RangeCache:
    """Cached blocks in a folder, limited to ``limit_bytes`` and shared by a host's processes.

    If the folder is not writable, blocks are not cached, and a warning is logged once.
    """

    def __init__(self, folder: Path, limit_bytes: int = DEFAULT_BYTES) -> None:
        self.folder, self.limit_bytes = folder, limit_bytes
        self._verified_inodes: dict[tuple[str, str], int] = {}
        self._is_writable = True

    def read(self, key: str, block_idx: int, start: int, stop: int) -> bytes | None:
        """Read bytes ``start`` ... ``stop`` - 1 in a block; None if the block is not cached or is damaged."""
        name = _block_name(block_idx)
        path = self.folder / key / name
        try:
            with open(path, "rb", buffering=0) as file:
                status = os.fstat(file.fileno())
                if self._verified_inodes.get((key, name)) == status.st_ino:
                    return os.pread(file.fileno(), stop - start, start)
                content = file.readall()
            if len(content) < 4 or zlib.crc32(content[:-4]) != int.from_bytes(content[-4:], "little"):
                log.warn_once(f"{path} is damaged: its checksum does not match; fetching it again")
                return None
            self._verified_inodes[key, name] = status.st_ino
            os.utime(path)  # mark as recently used; the oldest files are evicted first
            return content[start:stop]
        except OSError:
            return None

    def add(self, key: str, block_idx: int, data: bytes) -> None:
        """Add a block to the cache."""
        if not self._is_writable:
            return
        name, content = _block_name(block_idx), data + zlib.crc32(data).to_bytes(4, "little")

        def write(path: Path) -> None:
            path.write_bytes(content)
            self._verified_inodes[key, name] = path.stat().st_ino

        try:
            self._store(key, name, len(content), write)
        except OSError as error:
            self._is_writable = False
            log.warn_once(
                f"{self.folder} cannot be written ({error}): blocks of object stores are not cached. Set "
                "--object-storage-cache-path to a local folder with free space."
            )

    def fetch_object(self, path: str) -> Path:
        """Fetch a complete object once per host, as a local copy; return its path.

        Raises:
            DataError: the object cannot be fetched or stored.
        """
        size, key = identity(path)
        target, crc_path = self.folder / key / "whole", self.folder / key / "whole.crc32"

        def fetch(temporary: Path) -> None:
            _, crc32 = files.write_chunks(temporary, object_store.read_chunks(path, size))
            files.replace_bytes(crc_path, b"%08x" % crc32)

        try:
            with self._locked(f"{key}.lock"):
                if not _is_complete(target, crc_path, size):
                    self._store(key, target.name, size + 8, fetch)  # 8 bytes for whole.crc32
                os.utime(target)
        except OSError as error:
            raise DataError(
                f"{path} cannot be cached in {self.folder}: {error}. Set --object-storage-cache-path to a local folder "
                "with free space, or increase --object-storage-cache-gb."
            ) from error
        return target

    def _store(self, key: str, name: str, num_bytes: int, write: Callable[[Path], object]) -> None:
        """Reserve ``num_bytes``, write the file under a temporary name, and rename it.

        Raises:
            OSError: the file cannot be written, or is larger than the cache limit.
        """
        if num_bytes > self.limit_bytes:
            raise OSError(f"it has {num_bytes} bytes, but the limit of the cache is {self.limit_bytes}")
        target = self.folder / key / name
        temporary = target.with_name(f".{name}.{os.getpid()}-{threading.get_ident()}.tmp")
        target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with self._locked_usage() as used:
            if used[0] + num_bytes > self.limit_bytes:
                used[0] = self._evict(used[0], num_bytes)
            used[0] += num_bytes
        num_unused_bytes = num_bytes  # reserved bytes to release if the file cannot be written
        try:
            write(temporary)
            with self._locked_usage() as used:
                num_unused_bytes = (
                    target.stat().st_size if target.exists() else 0
                )  # another process may have fetched it too
                os.replace(temporary, target)
                used[0] -= num_unused_bytes
                num_unused_bytes = 0
        finally:
            temporary.unlink(missing_ok=True)
            if num_unused_bytes:
                with self._locked_usage() as used:
                    used[0] -= num_unused_bytes

    def _evict(self, used: int, num_bytes: int) -> int:
        """Delete the oldest files until ``num_bytes`` plus a margin fit; return the bytes then in use."""
        entries = []
        for path in self.folder.glob("*/*"):
            with suppress(OSError):
                status = path.stat()
                if path.suffix == ".tmp" and time.time() - status.st_mtime < _STALE_S:  # another process is writing it
                    continue
                entries.append((path.name.startswith("whole"), status.st_mtime, status.st_size, path))
        # Do not count bytes that killed processes have reserved but never written.
        used = min(used, sum(size for _, _, size, _ in entries) + _MAX_PENDING_WRITES * BLOCK_BYTES)
        for _, _, size, path in sorted(entries):
            if used <= max(self.limit_bytes * _EVICTION_TARGET - num_bytes, 0):
                break
            with suppress(OSError):
                path.unlink()
                used -= size
        return used

    @contextmanager
    def _locked_usage(self) -> Iterator[list[int]]:
        """Lock the byte count and yield it as a list with one number, which the caller may change."""
        with self._locked("used") as lock:
            used = [int(lock.previous_text) if lock.previous_text.isdigit() else 0]
            yield used
            lock.write(b"%d" % max(used[0], 0))

    @contextmanager
    def _locked(self, name: str) -> Iterator[FileLock]:
        """Hold a folder lock: a kernel lock between processes, and a thread lock within this process."""
        with _thread_lock:
            lock = FileLock(
                self.folder / name,
                "lockf",
                wait_s=lambda _: math.inf,
                describe=lambda _: "",
                error=DataError,
                without_lock=lambda *_: True,
                poll_s=_POLL_S,
            )
            try:
                yield lock
            finally:
                lock.release(removes_file=False)


def identity(path: str) -> tuple[int, str]:
    """Look up an object's size, and a key that changes when the object is modified.

    Raises:
        DataError: the object does not exist, or the store cannot be accessed.
    """
    size, version = object_store.version(path)
    return size, hashlib.sha256(f"{path}\n{size}\n{version}".encode()).hexdigest()[:24]


def _block_name(block_idx: int) -> str:
    return f"{block_idx:08d}.block"


def _is_complete(path: Path, crc_path: Path, size: int) -> bool:
    try:
        return path.stat().st_size == size and b"%08x" % files.size_and_crc(path)[1] == crc_path.read_bytes()
    except OSError:
        return False


Range = tuple[int, int]
"""A byte range: (offset, number of bytes)."""


class _Requests:
    """One process's thread pool and pending requests."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.pool = ThreadPoolExecutor(NUM_THREADS, "range")
        self.pending: OrderedDict[Range, Future[dict[Range, bytearray]]] = OrderedDict()
        self.locks = [threading.Lock() for _ in range(_NUM_LOCKS)]


class RangeReader:
    """A ``megatron.data.file_io.Reader`` that reads an object through a cache and can prefetch ranges.

    It may be used in processes forked after its creation; each process has its own requests.

    Raises:
        DataError: the object does not exist.
    """

    def __init__(self, path: str, cache: RangeCache) -> None:
        self.path, self._cache = path, cache
        self.size, self._key = identity(path)
        self._requests: _Requests | None = None

    def read(self, offset: int, count: int) -> np.ndarray:
        """Copy bytes ``offset`` ... ``offset + count - 1`` as uint8.

        Raises:
            DataError: the bytes cannot be fetched from the store.
        """
        requests, span = self._process_requests(), (offset, count)
        pending = requests.pending.pop(span, None)
        if pending is not None:
            return np.frombuffer(pending.result().pop(span), np.uint8)
        block_ranges = list(_block_ranges(offset, count))
        chunks = (
            map(self._read_block, block_ranges)
            if len(block_ranges) == 1
            else requests.pool.map(self._read_block, block_ranges)
        )
        return np.frombuffer(bytearray().join(chunks), np.uint8)

    def prefetch(self, ranges: Sequence[Range]) -> None:
        """Start to fetch ``ranges`` in a background thread. A later ``read`` for the same range consumes the result."""
        requests = self._process_requests()
        new_ranges = [span for span in dict.fromkeys(ranges) if span not in requests.pending]
        requests.pending.update(dict.fromkeys(new_ranges, requests.pool.submit(self._fetch_ranges, new_ranges)))
        while len(requests.pending) > _MAX_PENDING_RANGES:  # drop the oldest ranges, which were never read
            requests.pending.popitem(last=False)

    def _process_requests(self) -> _Requests:
        """Find this process's requests; create them on first use and after a fork."""
        if self._requests is None or self._requests.pid != os.getpid():
            self._requests = _Requests()
        return self._requests

    def _fetch_ranges(self, ranges: Sequence[Range]) -> dict[Range, bytearray]:
        """Read each range's bytes."""
        return {span: bytearray().join(map(self._read_block, _block_ranges(*span))) for span in ranges}

    def _read_block(self, block_range: tuple[int, int, int]) -> bytes:
        """Read ``block_range`` (block number, start, stop), from the cache or from the store."""
        block_idx, start, stop = block_range
        data = self._cache.read(self._key, block_idx, start, stop)
        if data is not None:
            return data
        with self._process_requests().locks[
            block_idx % _NUM_LOCKS
        ]:  # only one of the threads that need the block fetches it
            data = self._cache.read(self._key, block_idx, start, stop)
            if data is None:
                first = block_idx * BLOCK_BYTES
                block = object_store.read_range(self.path, first, min(first + BLOCK_BYTES, self.size))
                self._cache.add(self._key, block_idx, block)
                data = block[start:stop]
        return data


def _block_ranges(offset: int, count: int) -> Iterator[tuple[int, int, int]]:
    """Yield (block number, start, stop) for each block that contains these bytes."""
    end = offset + count
    for block_idx in range(offset // BLOCK_BYTES, -(-end // BLOCK_BYTES)):
        first = block_idx * BLOCK_BYTES
        yield block_idx, max(offset - first, 0), min(end - first, BLOCK_BYTES)
