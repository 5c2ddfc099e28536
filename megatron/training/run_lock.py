"""One job at a time in a run folder: ``run.lock`` says who, and the kernel's lock on it says whether it lives.

The lock (``lockf``) belongs to the process of rank 0: it ends with it however it ends, and what rank 0 has forked does
not hold it. So a file that nobody locks is stale, and is taken over. (Whoever opens the file once more in that process
and closes it gives the lock away: nobody does.) A file system without such locks leaves the text: a process of this
machine is looked up; one of another machine counts as alive unless it is of the same job.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import platform
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from megatron import log
from megatron.errors import ConfigError
from megatron.training.own_job import job
from megatron.training.rank_zero import by_rank_0
from megatron.training.world import World

NAME = "run.lock"
RESTART_WAIT_S = 30.0
"""A restart of the same job waits so long for the rank 0 before it, which may still be ending."""
_POLL_S = 0.05
_SILENCE_S = 1.0  # between taking the lock and writing who did
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)


@contextmanager
def held(folder: Path, world: World) -> Iterator[None]:
    """Hold the lock of the run folder ``folder`` within, for all ranks. Collective.

    Raises:
        ConfigError: another job writes there; on all ranks alike.
    """
    locks: list[RunLock] = []
    by_rank_0(world, lambda: locks.append(RunLock(folder)))
    try:
        yield
    finally:
        for lock in locks:
            lock.release()


class RunLock:
    """Holds ``folder / run.lock`` from construction to ``release``, or the end of this process.

    Raises:
        ConfigError: another job writes there.
    """

    def __init__(self, folder: Path, wait_s: float = RESTART_WAIT_S) -> None:
        self.path = folder / NAME
        self._descriptor: int | None = None
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._wait(wait_s)
        except OSError as error:
            raise ConfigError(
                f"{self.path} must be a file that can be written and locked, got: {error}. Name another folder with "
                "--save, or remove what is there"
            ) from error

    def release(self) -> None:
        """Let the folder go; a second call does nothing."""
        if self._descriptor is not None:
            with suppress(OSError):
                self.path.unlink()
            os.close(self._descriptor)
            self._descriptor = None

    def _wait(self, wait_s: float) -> None:
        """Take the lock; wait for an earlier start of this job, and for a holder that has not said yet who it is."""
        began = time.monotonic()
        while self._descriptor is None:
            found = self._try()
            if found is None:
                continue
            limit_s = (wait_s if _is_same_job(found) else 0.0) if found else _SILENCE_S
            if time.monotonic() - began >= limit_s:
                raise ConfigError(self._refusal(found))
            time.sleep(_POLL_S)

    def _try(self) -> dict[str, Any] | None:
        """Take the lock, or return what its holder has written; neither, if its file has just been removed."""
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            has_locks = True
        except OSError as error:
            has_locks = error.errno not in _NO_LOCKS
            if has_locks:
                return _read_and_close(descriptor)
        if not _is_file(descriptor, self.path):
            os.close(descriptor)
            return None
        found = _read(descriptor)
        if found and not has_locks and _may_live(found):
            os.close(descriptor)
            return found
        if found:
            log.info(f"{self.path} is stale: {_told(found)} is gone; taken over")
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps(_own()).encode() + b"\n", 0)
        self._descriptor = descriptor
        return None

    def _refusal(self, found: dict[str, Any]) -> str:
        return (
            f"one job at a time may write to {self.path.parent}, got {_told(found)}, which holds {self.path}. "
            "Name another folder with --save, or end that job; if it is gone, delete the file"
        )


def _own() -> dict[str, Any]:
    return {
        "host": platform.node(),
        "pid": os.getpid(),
        "started": _start_of(os.getpid()),
        "since": time.strftime("%Y-%m-%d %H:%M:%S"),
        "job": _job(),
    }


def _job() -> str | None:
    """Return what all starts of one job share: the launcher's name for it, else SLURM's."""
    return job() or os.environ.get("SLURM_JOB_ID")


def _is_same_job(found: dict[str, Any]) -> bool:
    return found.get("job") is not None and found["job"] == _job()


def _may_live(found: dict[str, Any]) -> bool:
    """Whether the process in ``found`` may run still, where no lock can tell."""
    if found.get("host") == platform.node():
        pid = found.get("pid")
        started = _start_of(pid) if isinstance(pid, int) and pid != os.getpid() else None
        return started is not None and started == found.get("started")
    return not _is_same_job(found)


def _start_of(pid: int) -> str | None:
    """Return when process ``pid`` started, in ticks since the machine did; None where it is gone or a zombie."""
    try:
        words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if words[0] in "ZX" else words[19]


def _told(found: dict[str, Any]) -> str:
    if not found:
        return "a process that has not written who it is"
    return f"host {found.get('host')}, pid {found.get('pid')}, since {found.get('since')}"


def _is_file(descriptor: int, path: Path) -> bool:
    """Whether ``path`` is the open file still: its holder removes it as it leaves."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except OSError:
        return False


def _read(descriptor: int) -> dict[str, Any]:
    try:
        found = json.loads(os.pread(descriptor, 4096, 0) or b"{}")
    except ValueError:
        return {"host": "unknown"}
    return found if isinstance(found, dict) else {}


def _read_and_close(descriptor: int) -> dict[str, Any]:
    found = _read(descriptor)
    os.close(descriptor)
    return found
