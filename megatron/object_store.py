"""Files of object stores by the names of ``fsspec`` (s3://bucket/key, memory://, file://): read in ranges, uploaded.

A store may answer an error or cut a body short: such a request is sent again, and a warning says so; what it gave is
used only if it has all of its bytes. A missing file and refused credentials are not tried again.
"""

from __future__ import annotations

import datetime
import io
import re
import time
import zlib
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeVar

from megatron import log
from megatron.errors import DataError

BLOCK_BYTES = 8 << 20
"""Bytes of a range; the next one is fetched while one is read. A file that is read takes three of them in memory."""

PAUSES_S = (0.5, 2.0, 8.0)
"""Pauses before the further attempts."""

_KEPT_BLOCKS = 3
_BUFFER_BYTES = 1 << 16
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://")
_TIMES = ("LastModified", "mtime", "last_modified", "updated", "created")
_T = TypeVar("_T")


class Status(NamedTuple):
    """What tells whether a file has changed: its bytes, and the time of the last change in ns (0: not told)."""

    size: int
    time_ns: int


def is_remote(path: str | Path) -> bool:
    """Return whether ``path`` is a name of fsspec, not one of this machine's files."""
    return isinstance(path, str) and _NAME.match(path) is not None


def status(path: str | Path) -> Status:
    """Return size and time of a file, wherever it is.

    Raises:
        OSError: a file of this machine cannot be looked at.
        DataError: one of a store cannot.
    """
    if not is_remote(path):
        found = Path(path).stat()
        return Status(found.st_size, found.st_mtime_ns)
    store, name = _store(str(path))
    info = _tried(str(path), "looking at it", lambda: store.info(name))
    changed = next((info[key] for key in _TIMES if info.get(key) is not None), 0)
    if isinstance(changed, datetime.datetime):
        changed = changed.timestamp()
    return Status(int(info["size"]), int(float(changed) * 1e9) if isinstance(changed, (int, float)) else 0)


def version(path: str) -> tuple[int, str]:
    """Return the bytes of a file of a store, and a text that is another when it was written again.

    Raises:
        DataError: there is none, or the store cannot be asked.
    """
    store, name = _store(path)

    def ask() -> dict[str, Any]:
        store.invalidate_cache()
        return store.info(name)

    info = _tried(path, "looking at it", ask)
    return int(info["size"]), " ".join(str(info[key]) for key in ("ETag", *_TIMES) if info.get(key) is not None)


def open_file(path: str | Path, buffering: int = -1) -> BinaryIO:
    """Open a file for reading, wherever it is.

    Raises:
        OSError, DataError: as by ``status``.
    """
    if is_remote(path):
        return io.BufferedReader(RemoteFile(str(path)), _BUFFER_BYTES)
    return open(path, "rb", buffering=buffering)  # type: ignore[return-value] # noqa: SIM115


def is_file(path: str) -> bool:
    """Return whether there is a file, and no folder, of this name in a store.

    Raises:
        DataError: there is neither, or the store cannot be asked.
    """
    store, name = _store(path)
    return _tried(path, "looking at it", lambda: store.info(name))["type"] == "file"


def files_below(path: str) -> list[tuple[tuple[str, ...], str]]:
    """Return the files below a folder of a store: the names that lead there from it, and the whole name; in order.

    Raises:
        DataError: the store cannot be asked.
    """
    store, name = _store(path)
    top = name.rstrip("/") + "/"
    store.invalidate_cache()  # what was listed before may have come or gone since
    names = _tried(path, "listing it", lambda: store.find(name))
    return sorted((tuple(each.removeprefix(top).split("/")), store.unstrip_protocol(each)) for each in names)


def sizes_below(path: str) -> dict[tuple[str, ...], int]:
    """Return the bytes of each file below a folder of a store, by the names that lead there; none if it is not there.

    Raises:
        DataError: the store cannot be asked.
    """
    store, name = _store(path)
    top = name.rstrip("/") + "/"

    def ask() -> dict[str, dict[str, Any]]:
        store.invalidate_cache()
        try:
            return store.find(name, detail=True)
        except FileNotFoundError:
            return {}

    found = _tried(path, "listing it", ask)
    inside = {each.removeprefix(top): info for each, info in found.items() if each.startswith(top)}
    return {tuple(each.split("/")): int(info["size"]) for each, info in inside.items()}


def join(path: str, *names: str) -> str:
    """Return the name of what lies in the folder ``path`` of a store."""
    return "/".join((path.rstrip("/"), *names))


def path_or_name(text: str) -> Path | str:
    """Return a path, or a name of fsspec as it is: the value of a flag."""
    return text if is_remote(text) else Path(text)


def size_of(path: str) -> int | None:
    """Return how many bytes a file of a store has now, None where there is none.

    Raises:
        DataError: the store cannot be asked.
    """
    store, name = _store(path)

    def ask() -> int | None:
        store.invalidate_cache()
        try:
            found = store.info(name)
        except FileNotFoundError:
            return None
        return int(found["size"]) if found["type"] == "file" else None

    return _tried(path, "looking at it", ask)


def read_range(path: str, start: int, stop: int) -> bytes:
    """Return the bytes ``start`` to ``stop`` of a file of a store, all of them.

    Raises:
        DataError: the store does not give them.
    """
    store, name = _store(path)

    def fetch() -> bytes:
        data = store.cat_file(name, start=start, end=stop)
        if len(data) != stop - start:
            raise OSError(f"{len(data)} of {stop - start} bytes came")
        return data

    return _tried(path, f"reading bytes {start}:{stop}", fetch)


def read_chunks(path: str, size: int) -> Iterator[bytes]:
    """Yield all ``size`` bytes of a file of a store, in ranges of BLOCK_BYTES of which the next is fetched ahead.

    Raises:
        DataError: as ``read_range``.
    """
    starts = range(0, size, BLOCK_BYTES)
    with ThreadPoolExecutor(1) as ahead:
        coming = deque[Future[bytes]]()
        for start in starts:
            coming.append(ahead.submit(read_range, path, start, min(start + BLOCK_BYTES, size)))
            if len(coming) == _KEPT_BLOCKS:
                yield coming.popleft().result()
        while coming:
            yield coming.popleft().result()


def upload(source: Path, path: str, *, crc32: int | None = None) -> None:
    """Put the file ``source`` into a store, and look at what is there then: its size, with ``crc32`` every byte too.

    A store shows an object once all of it has come; one that gave another size or checksum is sent once more.

    Raises:
        OSError: ``source`` cannot be read.
        DataError: the store does not take it whole.
    """
    size, (store, name) = source.stat().st_size, _store(path)

    def put() -> None:
        try:
            store.put_file(str(source), name)
        except FileNotFoundError as error:
            if source.exists():
                raise FileNotFoundError(f"no such bucket or folder: {error}") from error
            raise _Gone(source) from error
        found = size_of(path)
        if found != size:
            raise OSError(f"{found or 0} of {size} bytes are there")
        if crc32 is not None and checksum(path, size) != crc32:
            raise OSError("what is there has another checksum")

    try:
        _tried(path, f"uploading {source}", put)
    except _Gone as gone:
        raise FileNotFoundError(f"{gone} is no longer there") from gone


def checksum(path: str, size: int) -> int:
    """Return the crc32 of all ``size`` bytes of a file of a store.

    Raises:
        DataError: as ``read_range``.
    """
    crc = 0
    for chunk in read_chunks(path, size):
        crc = zlib.crc32(chunk, crc)
    return crc


def write_bytes(path: str, data: bytes) -> None:
    """Put ``data``, which are few, into a store as the file ``path``.

    Raises:
        DataError: the store does not take it.
    """
    store, name = _store(path)
    _tried(path, "uploading it", lambda: store.pipe_file(name, data))


def check_writable(path: str) -> None:
    """Put a small file beside ``path`` of a store, and delete it.

    Raises:
        DataError: the store does not take it.
    """
    write_bytes(f"{path.rstrip('/')}.probe", b"probe")
    remove(f"{path.rstrip('/')}.probe")


def remove(path: str) -> None:
    """Delete a file of a store; one that is not there is as good.

    Raises:
        DataError: the store refuses.
    """
    store, name = _store(path)

    def delete() -> None:
        store.invalidate_cache()
        with suppress(FileNotFoundError):
            store.rm_file(name)

    _tried(path, "deleting it", delete)


class _Gone(Exception):
    """A file of this machine has gone while it was uploaded; it holds its path."""


class RemoteFile(io.RawIOBase):
    """One file of a store, read in ranges of BLOCK_BYTES, the next of which is fetched ahead."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.path, self.size = path, status(path).size
        self._blocks: OrderedDict[int, Future[bytes]] = OrderedDict()
        self._ahead = ThreadPoolExecutor(1)
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self.size}[whence]
        self._position = max(0, base + offset)
        return self._position

    def readinto(self, buffer: Any) -> int:
        if self._position >= self.size:
            return 0
        number, start = divmod(self._position, BLOCK_BYTES)
        block = self._block(number).result()
        if (number + 1) * BLOCK_BYTES < self.size:
            self._block(number + 1)
        view = memoryview(buffer).cast("B")
        data = block[start : start + len(view)]
        view[: len(data)] = data
        self._position += len(data)
        return len(data)

    def close(self) -> None:
        if not self.closed:
            self._ahead.shutdown(wait=True, cancel_futures=True)
            self._blocks.clear()
        super().close()

    def _block(self, number: int) -> Future[bytes]:
        if number not in self._blocks:
            self._blocks[number] = self._ahead.submit(self._fetch, number)
            while len(self._blocks) > _KEPT_BLOCKS:
                self._blocks.popitem(last=False)
        self._blocks.move_to_end(number)
        return self._blocks[number]

    def _fetch(self, number: int) -> bytes:
        start = number * BLOCK_BYTES
        return read_range(self.path, start, min(start + BLOCK_BYTES, self.size))


def _store(path: str) -> tuple[Any, str]:
    """Return the file system of ``path``, and the name in it; one for each process, which may not share one."""
    try:
        from fsspec.core import url_to_fs  # torch brings it; loaded where such a name comes

        is_here = path.startswith(("file://", "local://"))
        return url_to_fs(path, **({"auto_mkdir": True} if is_here else {}))  # a store has no folders to be made
    except ImportError as error:
        raise DataError(f"{path} needs a package: {error}. For s3:// it is pip install -e '.[s3]'") from error
    except ValueError as error:
        raise DataError(f"{path} cannot be read: {error}") from error


def _tried(path: str, what: str, ask: Callable[[], _T]) -> _T:
    """Return what ``ask`` gives, asking again after PAUSES_S when it fails.

    Raises:
        DataError: it fails for good.
    """
    pauses: Iterator[float] = iter(PAUSES_S)
    while True:
        try:
            return ask()
        except _Gone:
            raise
        except (FileNotFoundError, IsADirectoryError) as error:
            raise DataError(f"{path} does not exist; check the name") from error
        except Exception as error:  # a store's own package raises its own kinds, too
            reason = f"{type(error).__name__}: {error}"
            if isinstance(error, PermissionError) or "Credential" in type(error).__name__:
                raise DataError(f"{path}: the store refuses access ({reason}). Check the credentials.") from error
            pause_s = next(pauses, None)
            if pause_s is None:
                raise DataError(
                    f"{path}: {what} failed {1 + len(PAUSES_S)} times ({reason}). Look at the store, then go on with "
                    "--resume."
                ) from error
            log.warning(f"{path}: {what} failed ({reason}); trying again in {pause_s} s")
            time.sleep(pause_s)
