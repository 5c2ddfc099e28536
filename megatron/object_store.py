"""Access to files in object stores by ``fsspec`` URL (s3://bucket/key, memory://, file://): ranged reads and uploads.

A request that fails or returns a truncated body is retried with a warning; data are only used if they are complete.
Requests for missing files and rejected credentials are not retried.
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
"""Bytes per ranged read. Ranges are prefetched; up to three ranges of a file are in memory."""

PAUSES_S = (0.5, 2.0, 8.0)
"""Pauses in seconds before the second and further attempts."""

_CACHED_BLOCKS = 3
_BUFFER_BYTES = 1 << 16
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://")
_TIME_KEYS = ("LastModified", "mtime", "last_modified", "updated", "created")
_T = TypeVar("_T")


class Status(NamedTuple):
    """A file's size in bytes and modification time in ns (0 if unknown), which show whether it has changed."""

    size: int
    time_ns: int


def is_remote(path: str | Path) -> bool:
    """Return True if ``path`` is an fsspec URL and not a local path."""
    return isinstance(path, str) and _NAME.match(path) is not None


def status(path: str | Path) -> Status:
    """Query the size and modification time of a local or remote file.

    Raises:
        OSError: a local file cannot be accessed.
        DataError: a remote file cannot be accessed.
    """
    if not is_remote(path):
        file_stat = Path(path).stat()
        return Status(file_stat.st_size, file_stat.st_mtime_ns)
    store, name = _store(str(path))
    info = _retry(str(path), "reading its metadata", lambda: store.info(name))
    changed = next((info[key] for key in _TIME_KEYS if info.get(key) is not None), 0)
    if isinstance(changed, datetime.datetime):
        changed = changed.timestamp()
    return Status(int(info["size"]), int(float(changed) * 1e9) if isinstance(changed, (int, float)) else 0)


def version(path: str) -> tuple[int, str]:
    """Return a remote file's (size in bytes, version string). The version changes when the file is overwritten.

    Raises:
        DataError: there is no such file, or the store cannot be accessed.
    """
    store, name = _store(path)

    def request_info() -> dict[str, Any]:
        store.invalidate_cache()
        return store.info(name)

    info = _retry(path, "reading its metadata", request_info)
    return int(info["size"]), " ".join(str(info[key]) for key in ("ETag", *_TIME_KEYS) if info.get(key) is not None)


def open_file(path: str | Path, buffering: int = -1) -> BinaryIO:
    """Open a local or remote file for reading.

    Raises:
        OSError, DataError: as ``status``.
    """
    if is_remote(path):
        return io.BufferedReader(RemoteFile(str(path)), _BUFFER_BYTES)
    return open(path, "rb", buffering=buffering)  # type: ignore[return-value] # noqa: SIM115


def is_file(path: str) -> bool:
    """Return True if ``path`` in a store is a file, and False if it is a folder.

    Raises:
        DataError: ``path`` does not exist, or the store cannot be accessed.
    """
    store, name = _store(path)
    return _retry(path, "reading its metadata", lambda: store.info(name))["type"] == "file"


def files_below(path: str) -> list[tuple[tuple[str, ...], str]]:
    """List all files below a store's folder as (path components relative to ``path``, full URL), sorted.

    Raises:
        DataError: the store cannot be accessed.
    """
    store, name = _store(path)
    top = name.rstrip("/") + "/"
    store.invalidate_cache()  # files may have been added or removed since they were listed
    names = _retry(path, "listing it", lambda: store.find(name))
    return sorted(
        (tuple(file_name.removeprefix(top).split("/")), store.unstrip_protocol(file_name)) for file_name in names
    )


def sizes_below(path: str) -> dict[tuple[str, ...], int]:
    """Map relative path components to the size in bytes for all files below a store's folder, which may be missing.

    Raises:
        DataError: the store cannot be accessed.
    """
    store, name = _store(path)
    top = name.rstrip("/") + "/"

    def list_files() -> dict[str, dict[str, Any]]:
        store.invalidate_cache()
        try:
            return store.find(name, detail=True)
        except FileNotFoundError:
            return {}

    info_by_name = _retry(path, "listing it", list_files)
    inside = {
        file_name.removeprefix(top): info for file_name, info in info_by_name.items() if file_name.startswith(top)
    }
    return {tuple(file_name.split("/")): int(info["size"]) for file_name, info in inside.items()}


def join(path: str, *names: str) -> str:
    """Return an entry's URL in the store's folder ``path``."""
    return "/".join((path.rstrip("/"), *names))


def path_or_name(text: str) -> Path | str:
    """Convert a flag's value: an fsspec URL is returned as a string, anything else as a Path."""
    return text if is_remote(text) else Path(text)


def size_of(path: str) -> int | None:
    """Return a remote file's current size in bytes; None if the file does not exist.

    Raises:
        DataError: the store cannot be accessed.
    """
    store, name = _store(path)

    def request_size() -> int | None:
        store.invalidate_cache()
        try:
            info = store.info(name)
        except FileNotFoundError:
            return None
        return int(info["size"]) if info["type"] == "file" else None

    return _retry(path, "reading its metadata", request_size)


def read_range(path: str, start: int, stop: int) -> bytes:
    """Read a remote file's bytes from ``start`` to ``stop``. The result is always complete.

    Raises:
        DataError: the range cannot be read.
    """
    store, name = _store(path)

    def fetch() -> bytes:
        data = store.cat_file(name, start=start, end=stop)
        if len(data) != stop - start:
            raise OSError(f"received {len(data)} of {stop - start} bytes")
        return data

    return _retry(path, f"reading bytes {start}:{stop}", fetch)


def read_chunks(path: str, size: int) -> Iterator[bytes]:
    """Yield all ``size`` bytes of a remote file in BLOCK_BYTES ranges; the next ranges are prefetched.

    Raises:
        DataError: as ``read_range``.
    """
    starts = range(0, size, BLOCK_BYTES)
    with ThreadPoolExecutor(1) as executor:
        pending = deque[Future[bytes]]()
        for start in starts:
            pending.append(executor.submit(read_range, path, start, min(start + BLOCK_BYTES, size)))
            if len(pending) == _CACHED_BLOCKS:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()


def upload(source: Path, path: str, *, crc32: int | None = None) -> None:
    """Upload the file ``source`` to a store and verify the remote size; with ``crc32`` also the content.

    A store shows an object only after it is complete. An upload with a wrong size or checksum is repeated.

    Raises:
        OSError: ``source`` cannot be read.
        DataError: the upload failed.
    """
    size, (store, name) = source.stat().st_size, _store(path)

    def upload_once() -> None:
        try:
            store.put_file(str(source), name)
        except FileNotFoundError as error:
            if source.exists():
                raise FileNotFoundError(f"no such bucket or folder: {error}") from error
            raise _SourceDeleted(source) from error
        remote_size = size_of(path)
        if remote_size != size:
            raise OSError(f"the store has {remote_size or 0} of {size} bytes")
        if crc32 is not None and checksum(path, size) != crc32:
            raise OSError("the uploaded file has another checksum")

    try:
        _retry(path, f"uploading {source}", upload_once)
    except _SourceDeleted as deleted:
        raise FileNotFoundError(f"{deleted} no longer exists") from deleted


def checksum(path: str, size: int) -> int:
    """Compute the crc32 over all ``size`` bytes of a remote file.

    Raises:
        DataError: as ``read_range``.
    """
    crc = 0
    for chunk in read_chunks(path, size):
        crc = zlib.crc32(chunk, crc)
    return crc


def write_bytes(path: str, data: bytes) -> None:
    """Write ``data`` (a small amount) to the file ``path`` in a store.

    Raises:
        DataError: the upload failed.
    """
    store, name = _store(path)
    _retry(path, "uploading it", lambda: store.pipe_file(name, data))


def check_writable(path: str) -> None:
    """Check that a store is writable: write a small file next to ``path`` and delete it.

    Raises:
        DataError: the store rejects the write or the deletion.
    """
    write_bytes(f"{path.rstrip('/')}.probe", b"probe")
    remove(f"{path.rstrip('/')}.probe")


def remove(path: str) -> None:
    """Delete a remote file; a missing file is not an error.

    Raises:
        DataError: the store rejects the deletion.
    """
    store, name = _store(path)

    def delete() -> None:
        store.invalidate_cache()
        with suppress(FileNotFoundError):
            store.rm_file(name)

    _retry(path, "deleting it", delete)


class _SourceDeleted(Exception):
    """A local file disappeared while it was uploaded; the argument is its path."""


class RemoteFile(io.RawIOBase):
    """A remote file for reading, fetched in BLOCK_BYTES ranges with one range of read-ahead."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.path, self.size = path, status(path).size
        self._blocks: OrderedDict[int, Future[bytes]] = OrderedDict()
        self._executor = ThreadPoolExecutor(1)
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
        idx, start = divmod(self._position, BLOCK_BYTES)
        block = self._block(idx).result()
        if (idx + 1) * BLOCK_BYTES < self.size:
            self._block(idx + 1)
        view = memoryview(buffer).cast("B")
        data = block[start : start + len(view)]
        view[: len(data)] = data
        self._position += len(data)
        return len(data)

    def close(self) -> None:
        if not self.closed:
            self._executor.shutdown(wait=True, cancel_futures=True)
            self._blocks.clear()
        super().close()

    def _block(self, block_idx: int) -> Future[bytes]:
        if block_idx not in self._blocks:
            self._blocks[block_idx] = self._executor.submit(self._fetch, block_idx)
            while len(self._blocks) > _CACHED_BLOCKS:
                self._blocks.popitem(last=False)
        self._blocks.move_to_end(block_idx)
        return self._blocks[block_idx]

    def _fetch(self, block_idx: int) -> bytes:
        start = block_idx * BLOCK_BYTES
        return read_range(self.path, start, min(start + BLOCK_BYTES, self.size))


def _store(path: str) -> tuple[Any, str]:
    """Return the file system for ``path`` and the name in it. File systems are not shared between processes."""
    try:
        from fsspec.core import url_to_fs  # a dependency of torch; imported only when a URL is used

        is_local = path.startswith(("file://", "local://"))
        return url_to_fs(path, **({"auto_mkdir": True} if is_local else {}))  # object stores have no folders to create
    except ImportError as error:
        raise DataError(f"{path} needs a package: {error}. For s3://, run: pip install -e '.[s3]'") from error
    except ValueError as error:
        raise DataError(f"{path} cannot be read: {error}") from error


def _retry(path: str, operation: str, request: Callable[[], _T]) -> _T:
    """Call ``request`` and return its result, retrying after PAUSES_S if it fails.

    Raises:
        DataError: all attempts failed, or the error is permanent (missing file, rejected credentials).
    """
    pauses: Iterator[float] = iter(PAUSES_S)
    while True:
        try:
            return request()
        except _SourceDeleted:
            raise
        except (FileNotFoundError, IsADirectoryError) as error:
            raise DataError(f"{path} does not exist; check the name") from error
        except Exception as error:  # a store's package also raises its own exception types
            reason = f"{type(error).__name__}: {error}"
            if isinstance(error, PermissionError) or "Credential" in type(error).__name__:
                raise DataError(f"{path}: the store denies access ({reason}). Check the credentials.") from error
            pause_s = next(pauses, None)
            if pause_s is None:
                raise DataError(
                    f"{path}: {operation} failed {1 + len(PAUSES_S)} times ({reason}). Check the store, then continue "
                    "with --resume."
                ) from error
            log.warning(f"{path}: {operation} failed ({reason}); retrying in {pause_s} s")
            time.sleep(pause_s)
