"""One job at a time in a run folder: ``run.lock`` says who, and the kernel's lock on it says whether it lives.

The lock (``lockf``) belongs to the process of rank 0: what rank 0 has forked does not hold it. A file system without
such locks leaves the text: a process of this machine is looked up; one of another machine counts as alive unless it is
of the same job.
"""

from __future__ import annotations

import errno
import json
import os
import platform
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megatron import log
from megatron.errors import ConfigError
from megatron.file_lock import FileLock
from megatron.training.job_starts import job
from megatron.training.rank_0 import run_on_rank_0
from megatron.training.world import World

NAME = "run.lock"
RESTART_WAIT_S = 150.0
"""A restart of the same job waits so long for the rank 0 before it, which may still be ending. The lock of a host that
has lost its power is free when its lease with the NFS server is over, after 90 seconds by default."""
_SILENCE_S = 1.0  # between taking the lock and writing who did
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)


@contextmanager
def held(folder: Path, world: World) -> Iterator[None]:
    """Hold the lock of the run folder ``folder`` within, for all ranks. Collective.

    Raises:
        ConfigError: another job writes there; on all ranks alike.
    """
    locks: list[RunLock] = []
    run_on_rank_0(world, lambda: locks.append(RunLock(folder)))
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
        path = folder / NAME

        def patience(text: bytes) -> float:
            """Wait for an earlier start of this job, and for a holder that has not said yet who it is."""
            found = _parsed(text)
            return (wait_s if _is_same_job(found) else 0.0) if found else _SILENCE_S

        def refusal(text: bytes) -> str:
            return (
                f"one job at a time may write to {folder}, got {_format_holder(_parsed(text))}, which holds {path}. "
                "Name another folder with --save, or end that job; if it is gone, delete the file"
            )

        try:
            self._lock = FileLock(
                path, "lockf", wait_s=patience, describe=refusal, error=ConfigError, without_lock=_is_left
            )
            if found := _parsed(self._lock.left):
                log.info(f"{path} is stale: {_format_holder(found)} is gone; taken over")
            self._lock.write(json.dumps(_own()).encode() + b"\n")
        except OSError as error:
            raise ConfigError(
                f"{path} must be a file that can be written and locked, got: {error}. Name another folder with "
                "--save, or remove what is there"
            ) from error

    def release(self) -> None:
        """Let the folder go; a second call does nothing."""
        self._lock.release()


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


def _is_left(error: OSError, text: bytes) -> bool:
    """Whether the file system has no locks, and nobody who may live holds the file by its text."""
    found = _parsed(text)
    return error.errno in _NO_LOCKS and not (found and _may_live(found))


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


def _format_holder(found: dict[str, Any]) -> str:
    if not found:
        return "a process that has not written who it is"
    return f"host {found.get('host')}, pid {found.get('pid')}, since {found.get('since')}"


def _parsed(text: bytes) -> dict[str, Any]:
    try:
        found = json.loads(text or b"{}")
    except ValueError:
        return {"host": "unknown"}
    return found if isinstance(found, dict) else {}
