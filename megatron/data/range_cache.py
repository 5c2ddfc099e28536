"""Token files of object stores: read in blocks, which a cache on this host's disk keeps for all of its processes.

| in the folder of the cache | is |
|---|---|
| ``<object>/00000003.block`` | one block of an object, and behind it the crc32 of that block |
| ``<object>/whole`` | a copy of a whole one (an index); ``whole.crc32`` has its checksum |
| ``used`` | bytes of all of these; who adds one locks it, and deletes what was used longest ago if they are too many |

``<object>`` follows from name, size and version of the object, so one that was written again is another. A file appears
by a rename, whole. One whose checksum does not fit is fetched again; a process compares it the first time it reads it.
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
"""Bytes of a block. Documents are read in random order, so most of a larger one would be read for nothing."""

DEFAULT_BYTES = 16 * 10**9
NUM_THREADS = 16
"""Requests at a time of each process that reads an object."""

_STALE_S = 3600.0
_MOST_ON_THE_WAY = 1024
"""Blocks that the processes of a host write at a time, at most."""

_MOST_COMING = 1 << 14
_NUM_LOCKS = 64
_SHARE_LEFT = 0.9
_WAIT_S = 0.01
_own = threading.RLock()


def _renew_lock() -> None:
    global _own
    _own = threading.RLock()  # a thread of the process that forked this one may have held it


os.register_at_fork(after_in_child=_renew_lock)


class RangeCache:
    """A folder of blocks of objects, of ``limit_bytes`` at most, which the processes of a host share.

    Where it cannot be written, blocks are used and not kept, which is said once.
    """

    def __init__(self, folder: Path, limit_bytes: int = DEFAULT_BYTES) -> None:
        self.folder, self.limit_bytes = folder, limit_bytes
        self._compared: dict[tuple[str, str], int] = {}
        self._is_writable = True

    def read(self, key: str, number: int, start: int, stop: int) -> bytes | None:
        """Return bytes ``start`` to ``stop`` of a block, None where it is not there whole."""
        name = _block_name(number)
        path = self.folder / key / name
        try:
            with open(path, "rb", buffering=0) as file:
                found = os.fstat(file.fileno())
                if self._compared.get((key, name)) == found.st_ino:
                    return os.pread(file.fileno(), stop - start, start)
                content = file.readall()
            if len(content) < 4 or zlib.crc32(content[:-4]) != int.from_bytes(content[-4:], "little"):
                log.warn_once(f"{path} is damaged: its checksum does not fit; it is fetched again")
                return None
            self._compared[key, name] = found.st_ino
            os.utime(path)  # used now: the oldest go first
            return content[start:stop]
        except OSError:
            return None

    def add(self, key: str, number: int, data: bytes) -> None:
        """Keep a block."""
        if not self._is_writable:
            return
        name, content = _block_name(number), data + zlib.crc32(data).to_bytes(4, "little")

        def write(path: Path) -> None:
            path.write_bytes(content)
            self._compared[key, name] = path.stat().st_ino

        try:
            self._keep(key, name, len(content), write)
        except OSError as error:
            self._is_writable = False
            log.warn_once(
                f"{self.folder} cannot be written ({error}): blocks of object stores are not kept. Name a folder of "
                "this host with room by --object-storage-cache-path."
            )

    def whole(self, path: str) -> Path:
        """Return a copy of a whole object, fetched once for all processes of this host.

        Raises:
            DataError: the store does not give it, or it cannot be kept here.
        """
        size, key = identity(path)
        target, noted = self.folder / key / "whole", self.folder / key / "whole.crc32"

        def fetch(temporary: Path) -> None:
            _, crc32 = files.write_chunks(temporary, object_store.read_chunks(path, size))
            files.replace_bytes(noted, b"%08x" % crc32)

        try:
            with self._locked(f"{key}.lock"):
                if not _is_whole(target, noted, size):
                    self._keep(key, target.name, size + 8, fetch)  # its checksum, too
                os.utime(target)
        except OSError as error:
            raise DataError(
                f"{path} must be kept in {self.folder}: {error}. Name a folder of this host with room by "
                "--object-storage-cache-path, or raise --object-storage-cache-gb."
            ) from error
        return target

    def _keep(self, key: str, name: str, num_bytes: int, write: Callable[[Path], object]) -> None:
        """Have a file of ``num_bytes`` written, and then give it its name.

        Raises:
            OSError: it cannot be written, or is larger than all may be.
        """
        if num_bytes > self.limit_bytes:
            raise OSError(f"it has {num_bytes} bytes, of all are {self.limit_bytes} allowed")
        target = self.folder / key / name
        temporary = target.with_name(f".{name}.{os.getpid()}-{threading.get_ident()}.tmp")
        target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with self._counted() as used:
            if used[0] + num_bytes > self.limit_bytes:
                used[0] = self._make_room(used[0], num_bytes)
            used[0] += num_bytes
        gone = num_bytes  # if it is not written
        try:
            write(temporary)
            with self._counted() as used:
                gone = target.stat().st_size if target.exists() else 0  # another process has fetched it, too
                os.replace(temporary, target)
                used[0] -= gone
                gone = 0
        finally:
            temporary.unlink(missing_ok=True)
            if gone:
                with self._counted() as used:
                    used[0] -= gone

    def _make_room(self, used: int, num_bytes: int) -> int:
        """Delete the oldest files until ``num_bytes`` and some more have room; return how many bytes are used then."""
        found = []
        for path in self.folder.glob("*/*"):
            with suppress(OSError):
                status = path.stat()
                if path.suffix == ".tmp" and time.time() - status.st_mtime < _STALE_S:  # somebody is writing it
                    continue
                found.append((path.name.startswith("whole"), status.st_mtime, status.st_size, path))
        used = min(used, sum(size for _, _, size, _ in found) + _MOST_ON_THE_WAY * BLOCK_BYTES)  # killed ones count not
        for _, _, size, path in sorted(found):
            if used <= max(self.limit_bytes * _SHARE_LEFT - num_bytes, 0):
                break
            with suppress(OSError):
                path.unlink()
                used -= size
        return used

    @contextmanager
    def _counted(self) -> Iterator[list[int]]:
        """Hold the count of bytes, which may be changed."""
        with self._locked("used") as lock:
            used = [int(lock.left) if lock.left.isdigit() else 0]
            yield used
            lock.write(b"%d" % max(used[0], 0))

    @contextmanager
    def _locked(self, name: str) -> Iterator[FileLock]:
        """Hold a lock of the folder: among processes by the kernel, among threads of this one by another."""
        with _own:
            lock = FileLock(
                self.folder / name,
                "lockf",
                wait_s=lambda _: math.inf,
                describe=lambda _: "",
                error=DataError,
                without_lock=lambda *_: True,
                poll_s=_WAIT_S,
            )
            try:
                yield lock
            finally:
                lock.release(removes_file=False)


def identity(path: str) -> tuple[int, str]:
    """Return size of an object, and a text that is another when it was written again.

    Raises:
        DataError: there is no such object, or the store cannot be asked.
    """
    size, version = object_store.version(path)
    return size, hashlib.sha256(f"{path}\n{size}\n{version}".encode()).hexdigest()[:24]


def _block_name(number: int) -> str:
    return f"{number:08d}.block"


def _is_whole(path: Path, noted: Path, size: int) -> bool:
    try:
        return path.stat().st_size == size and b"%08x" % files.size_and_crc(path)[1] == noted.read_bytes()
    except OSError:
        return False


Range = tuple[int, int]
"""Of bytes: where it begins, and how many there are."""


class _Requests:
    """What one process has asked for: its threads, and what they bring."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.pool = ThreadPoolExecutor(NUM_THREADS, "range")
        self.coming: OrderedDict[Range, Future[dict[Range, bytearray]]] = OrderedDict()
        self.locks = [threading.Lock() for _ in range(_NUM_LOCKS)]


class RangeReader:
    """Reads an object through a cache, as ``megatron.data.file_io.Reader``; what ``prefetch`` names is fetched ahead.

    It may be used in processes forked after it was made: each has requests of its own.

    Raises:
        DataError: there is no such object.
    """

    def __init__(self, path: str, cache: RangeCache) -> None:
        self.path, self._cache = path, cache
        self.size, self._key = identity(path)
        self._requests: _Requests | None = None

    def read(self, offset: int, count: int) -> np.ndarray:
        """Return bytes ``offset`` ... ``offset + count - 1`` as uint8, in memory of their own.

        Raises:
            DataError: the store does not give them.
        """
        own, asked = self._own(), (offset, count)
        coming = own.coming.pop(asked, None)
        if coming is not None:
            return np.frombuffer(coming.result().pop(asked), np.uint8)
        parts = list(_parts(offset, count))
        found = map(self._part, parts) if len(parts) == 1 else own.pool.map(self._part, parts)
        return np.frombuffer(bytearray().join(found), np.uint8)

    def prefetch(self, ranges: Sequence[Range]) -> None:
        """Have ``ranges`` fetched one after another, beside those of other calls, each for one ``read`` of it."""
        own = self._own()
        new = [each for each in dict.fromkeys(ranges) if each not in own.coming]
        own.coming.update(dict.fromkeys(new, own.pool.submit(self._bring, new)))
        while len(own.coming) > _MOST_COMING:  # named by somebody who then did not read
            own.coming.popitem(last=False)

    def _own(self) -> _Requests:
        if self._requests is None or self._requests.pid != os.getpid():
            self._requests = _Requests()
        return self._requests

    def _bring(self, ranges: Sequence[Range]) -> dict[Range, bytearray]:
        return {each: bytearray().join(map(self._part, _parts(*each))) for each in ranges}

    def _part(self, part: tuple[int, int, int]) -> bytes:
        number, start, stop = part
        found = self._cache.read(self._key, number, start, stop)
        if found is not None:
            return found
        with self._own().locks[number % _NUM_LOCKS]:  # of several threads that need it one fetches it
            found = self._cache.read(self._key, number, start, stop)
            if found is None:
                first = number * BLOCK_BYTES
                block = object_store.read_range(self.path, first, min(first + BLOCK_BYTES, self.size))
                self._cache.add(self._key, number, block)
                found = block[start:stop]
        return found


def _parts(offset: int, count: int) -> Iterator[tuple[int, int, int]]:
    """Yield the numbers of the blocks that hold these bytes, and from where to where in each."""
    end = offset + count
    for number in range(offset // BLOCK_BYTES, -(-end // BLOCK_BYTES)):
        first = number * BLOCK_BYTES
        yield number, max(offset - first, 0), min(end - first, BLOCK_BYTES)
