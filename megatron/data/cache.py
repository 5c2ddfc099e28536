"""Cache for index arrays that are computed once per host and memory-mapped by all of its processes.

Processes that need the same set of files share the work without waiting for each other. Each process iterates over the
files from a different starting point, skips existing files, defers files that another process has claimed, and finally
builds the files that are still missing. A file is written under a temporary name and then renamed, so readers never
see an incomplete file. If two processes build the same file, the second uses the first one's file, so that it is
in memory only once.

| bytes | file header |
|---|---|
| 0 | ``mdc2`` |
| 4 | the array's numpy type string |
| 8 | content length in bytes |
| 16 | crc32 of the content and the 16 bytes above |
| 24 | time of the last successful checksum verification in nanoseconds; also the file's modification time |

The checksum is verified once per host and job: a process trusts a file if a process on this host verified it after
this process started and the file has not been written since; otherwise it verifies the checksum itself. A file with a
wrong checksum is rebuilt.

If the folder is not writable, all arrays are stored in the process's own memory.
"""

from __future__ import annotations

import math
import os
import platform
import tempfile
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import cached_property
from pathlib import Path

import numpy as np

from megatron import files, log
from megatron.data import range_cache
from megatron.data.range_cache import RangeCache
from megatron.file_lock import FileLock

_MAGIC, _SUFFIX = b"mdc2", ".mdc"
_CRC_OFFSET, _VERIFIED_OFFSET, _HEADER_BYTES = 16, 24, 32
_MAX_UNUSED_S = 14 * 24 * 3600
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def _process_start_ns() -> int:
    """Read this process's start time in ns since the epoch, like file times; the current time if unknown."""
    with suppress(OSError, ValueError, AttributeError):
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        age_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME) - ticks * 10**9 // os.sysconf("SC_CLK_TCK")
        return time.time_ns() - age_ns
    return time.time_ns()


_PROCESS_START_NS = _process_start_ns()
"""Start time of this process or of the process that it was forked from. All ranks of a job start before the first one
opens data; the import of this module may be later."""

Build = Callable[[int], Iterable[np.ndarray]]
"""A function that builds the content of the file with a given index, as a sequence of arrays of one type."""


class IndexCache:
    """A folder of cached arrays with one subfolder per host, so that no process deletes files mapped by another host.

    Args:
        path: the folder, created on demand. None: a per-user subfolder in the system's temporary folder.
        objects_path: folder for data read from object stores; None: a subfolder of this cache.
        objects_bytes: maximum data size in ``objects_path``.
    """

    def __init__(
        self,
        path: str | Path | None = None,
        objects_path: str | Path | None = None,
        objects_bytes: int = range_cache.DEFAULT_BYTES,
    ) -> None:
        self._has_explicit_path = path is not None
        default_path = Path(tempfile.gettempdir()) / f"megatron-data-{os.getuid()}"
        self._root = Path(path) if path is not None else default_path
        self.folder = self._root / (platform.node() or "host")
        self._is_writable: bool | None = None
        self._objects_path, self._objects_bytes = objects_path, objects_bytes

    @cached_property
    def ranges(self) -> RangeCache:
        """Cache for object-store data, shared by this host's processes."""
        if self._objects_path is not None:
            return RangeCache(Path(self._objects_path) / self.folder.name, self._objects_bytes)
        return RangeCache(self.folder / "objects", self._objects_bytes if self._can_write() else 0)

    def array(self, name: str, build: Callable[[], np.ndarray], *, is_durable: bool = False) -> np.ndarray:
        """Open the read-only array ``name``; build it with ``build`` if it is not cached."""
        return self.arrays(name, 1, lambda _: [build()], is_durable=is_durable)[0]

    def arrays(self, name: str, count: int, build: Build, *, is_durable: bool = False) -> list[np.ndarray]:
        """Open ``count`` read-only one-dimensional arrays; build the arrays that are not cached.

        Args:
            name: letters, digits, ``-`` and ``_``; must change with everything that the content depends on.
            is_durable: fsync each file, so that it remains valid after a machine crash. By default, files
                from an earlier boot are not used.
        """
        boot_id = "" if is_durable else _boot_id()
        stem = f"{name}-{boot_id}" if boot_id else name
        arrays: dict[int, np.ndarray] = {}
        for idx in self._indices_to_build(stem, count, arrays):
            with self._hold_claim(self._file_path(stem, idx)):
                self._build_file(arrays, stem, idx, build, should_fsync=not boot_id)
        return [arrays[idx] for idx in range(count)]

    def built_once(self, name: str, build: Callable[[], Iterable[np.ndarray]]) -> np.ndarray:
        """Open the read-only array ``name``; one process on the host builds it, and the others wait.

        Use it for arrays that cannot be built in parts and take too much memory to be built in every process. If the
        folder cannot be written or locked, each process builds the array nevertheless.

        Args:
            build: returns the content as a sequence of arrays with one type.
        """
        with ExitStack() as stack:
            if self._can_write():
                try:
                    lock = FileLock(
                        self.folder / f".{name}{_SUFFIX}.lock",
                        "flock",
                        wait_s=lambda _: math.inf,
                        describe=lambda _: "",
                        error=OSError,
                        without_lock=lambda *_: True,
                    )
                    stack.callback(lock.release)
                except OSError as error:
                    self._disable_writes(error)
            return self.arrays(name, 1, lambda _: build())[0]

    def keep_newest(self, name_prefix: str, num_retained: int) -> None:
        """Delete old file sets whose names start with ``name_prefix``.

        The ``num_retained`` sets that were built or verified last are retained.
        """
        file_sets: dict[str, list[tuple[float, Path]]] = {}
        with suppress(OSError):
            for path in self.folder.glob(f"{name_prefix}*{_SUFFIX}"):
                with suppress(OSError):
                    file_sets.setdefault(_stem(path), []).append((path.stat().st_mtime, path))
        for paths in sorted(file_sets.values(), key=max)[:-num_retained]:
            for _, path in paths:
                with suppress(OSError):
                    files.remove_file(path)

    def _file_path(self, stem: str, file_idx: int) -> Path:
        return self.folder / f"{stem}.{file_idx}{_SUFFIX}"

    def _indices_to_build(self, stem: str, count: int, arrays: dict[int, np.ndarray]) -> Iterator[int]:
        """Yield the indices of files to build; add files that other processes have built to ``arrays``."""
        first = (os.getpid() * 0x9E3779B1 >> 8) % max(count, 1)
        queue = deque((idx, False) for idx in [*range(first, count), *range(first)])
        while queue:
            idx, is_deferred = queue.popleft()
            path = self._file_path(stem, idx)
            if not is_deferred and _claim_path_of(path).exists():  # another process is building or verifying it
                queue.append((idx, True))
            elif (array := self._open_file(path)) is not None:
                arrays[idx] = array
            else:
                yield idx

    def _build_file(
        self, arrays: dict[int, np.ndarray], stem: str, file_idx: int, build: Build, should_fsync: bool
    ) -> None:
        """Build one file and add it to ``arrays``, memory-mapped, or in memory if it cannot be written."""
        if self._can_write():
            path = self._file_path(stem, file_idx)
            temporary = self.folder / f".{path.name}.{os.getpid()}.tmp"
            try:
                _write_file(temporary, build(file_idx), should_fsync)
                array = self._open_file(path)
                if array is None:
                    files.before_operation("rename", path)
                    os.replace(temporary, path)
                    array = self._open_file(path)
                if array is not None:
                    arrays[file_idx] = array
                    return
            except OSError as error:
                self._disable_writes(error)
            finally:
                with suppress(OSError):
                    temporary.unlink(missing_ok=True)
        arrays[file_idx] = np.concatenate(list(build(file_idx)))

    @contextmanager
    def _hold_claim(self, path: Path) -> Iterator[None]:
        """Mark the file as claimed by this process; the claim is only a hint to other processes."""
        claim_path = _claim_path_of(path)
        with suppress(OSError):
            if self._can_write():
                os.close(os.open(claim_path, os.O_CREAT | os.O_WRONLY, 0o600))
        try:
            yield
        finally:
            with suppress(OSError):
                claim_path.unlink(missing_ok=True)

    def _open_file(self, path: Path) -> np.ndarray | None:
        """Map the file's content; None if it does not exist or is damaged."""
        if not self._has_explicit_path and not _is_private(self._root):
            return None
        try:
            with open(path, "rb") as file:
                mtime_ns = os.fstat(file.fileno()).st_mtime_ns
                data = np.memmap(file, np.uint8, "r").view(np.ndarray)
        except (OSError, ValueError):  # numpy cannot map an empty file
            return None
        if not _is_complete(data):
            return None
        if not _is_verified(data, mtime_ns):
            with self._hold_claim(path):
                if not _has_valid_checksum(data):
                    log.warn_once(f"{path} is damaged: its checksum does not match its content; rebuilding it")
                    return None
            _mark_verified(path)
        return _content(data)

    def _can_write(self) -> bool:
        if self._is_writable is None:
            self._is_writable = True
            try:
                self._root.mkdir(parents=True, exist_ok=True, mode=0o700)
                if not self._has_explicit_path and not _is_private(self._root):
                    raise PermissionError("it belongs to another user, or other users can write to it")
                self.folder.mkdir(exist_ok=True)
                self._remove_unused()
            except OSError as error:
                self._disable_writes(error)
        return self._is_writable

    def _disable_writes(self, error: OSError) -> None:
        """Stop writing to the cache and log a warning once per process."""
        self._is_writable = False
        log.warn_once(
            f"{self.folder} cannot be written ({error}). Each process stores the document order in its own memory. Set "
            "--data-cache-path to a local folder of this host to share it."
        )

    def _remove_unused(self) -> None:
        """Delete cache files that have not been used for 14 days, including leftovers of killed processes."""
        oldest_mtime = time.time() - _MAX_UNUSED_S
        for path in [*self.folder.glob(f"*{_SUFFIX}"), *self.folder.glob(f".*{_SUFFIX}.*")]:
            with suppress(OSError):
                if path.stat().st_mtime < oldest_mtime:
                    files.remove_file(path)


def _stem(path: Path) -> str:
    """Return the name of the file set that ``path`` belongs to."""
    return path.name.removesuffix(_SUFFIX).rpartition(".")[0]


def _claim_path_of(path: Path) -> Path:
    return path.with_name(f".{path.name}.claim")


def _is_private(folder: Path) -> bool:
    """Return True if no other user can write to ``folder``. The default folder has a predictable name."""
    with suppress(OSError):
        status = os.lstat(folder)
        return status.st_uid == os.getuid() and (status.st_mode & 0o170022) == 0o040000
    return False


def _boot_id() -> str:
    with suppress(OSError):
        return _BOOT_ID.read_text()[:8]
    return ""


def _write_file(path: Path, chunks: Iterable[np.ndarray], should_fsync: bool) -> None:
    """Write ``chunks`` after an empty header, then fill in the header with the length and the checksum."""
    files.before_operation("create", path)
    with open(path, "wb") as file:
        file.write(bytes(_HEADER_BYTES))
        dtype, num_bytes, crc = np.dtype(np.uint8), 0, 0
        for chunk in chunks:
            files.before_operation("write", path)
            dtype = chunk.dtype
            content = np.ascontiguousarray(chunk).view(np.uint8).data
            num_bytes += file.write(content)
            crc = zlib.crc32(content, crc)
        checked_header = _MAGIC + dtype.str.encode().ljust(4) + num_bytes.to_bytes(8, "little")
        file.seek(0)
        file.write(checked_header + zlib.crc32(checked_header, crc).to_bytes(8, "little"))
        if should_fsync:
            files.before_operation("fsync", path)
            file.flush()
            os.fsync(file.fileno())
    _mark_verified(path)


def _is_complete(data: np.ndarray) -> bool:
    """Return True if the header is complete and the content has the length in the header."""
    header = data[:_HEADER_BYTES].tobytes()
    length = int.from_bytes(header[8:_CRC_OFFSET], "little")
    return len(header) == _HEADER_BYTES and header[:4] == _MAGIC and length == len(data) - _HEADER_BYTES


def _has_valid_checksum(data: np.ndarray) -> bool:
    """Return True if the checksum matches the content; takes 1 s per GB."""
    crc = zlib.crc32(data[:_CRC_OFFSET].data, zlib.crc32(data[_HEADER_BYTES:].data))
    return int.from_bytes(data[_CRC_OFFSET:_VERIFIED_OFFSET].tobytes(), "little") == crc


def _is_verified(data: np.ndarray, mtime_ns: int) -> bool:
    """Check if a process on this host verified the file after this process started, and it is unchanged since."""
    verified_ns = int.from_bytes(data[_VERIFIED_OFFSET:_HEADER_BYTES].tobytes(), "little")
    return verified_ns == mtime_ns and verified_ns >= _PROCESS_START_NS


def _mark_verified(path: Path) -> None:
    """Record the current time as the verification time; if this fails, each process verifies the file."""
    now_ns = time.time_ns() // 1000 * 1000  # some file systems truncate file times to microseconds
    with suppress(OSError), open(path, "r+b") as file:
        file.seek(_VERIFIED_OFFSET)
        file.write(now_ns.to_bytes(8, "little"))
        file.flush()
        os.utime(file.fileno(), ns=(now_ns, now_ns))


def _content(data: np.ndarray) -> np.ndarray:
    """Select the array that is stored after the header."""
    return data[_HEADER_BYTES:].view(np.dtype(data[4:8].tobytes().decode().strip()))
