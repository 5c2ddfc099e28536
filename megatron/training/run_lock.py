"""Lock that admits one job at a time to a run folder: ``run.lock`` names the holder and carries the kernel's file lock.

The lock (``lockf``) belongs to the process of rank 0 and is not inherited by its forks. On a file system without locks,
the holder named in the file is checked: on this machine, its process must exist; on another machine, it is assumed to
be alive unless it belongs to the same job.
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
from megatron.training.job_starts import job_id
from megatron.training.rank_0 import run_on_rank_0
from megatron.training.world import World

LOCK_NAME = "run.lock"
RESTART_WAIT_S = 150.0
"""Seconds for which a restart of the same job waits for the previous rank 0, which may still be exiting. The lock of a
host that lost power is released when its lease with the NFS server expires, after 90 seconds by default."""
_UNNAMED_WAIT_S = 1.0  # longest time between taking the lock and writing the holder's name
_NO_LOCK_ERRORS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)


@contextmanager
def hold_run_lock(folder: Path, world: World) -> Iterator[None]:
    """Hold the run folder's lock within the context, for all ranks. Collective.

    Raises:
        ConfigError: another job is writing to the folder; raised on all ranks.
    """
    locks: list[RunLock] = []
    run_on_rank_0(world, lambda: locks.append(RunLock(folder)))
    try:
        yield
    finally:
        for lock in locks:
            lock.release()


class RunLock:
    """Holds ``folder / run.lock`` from construction to ``release`` or the end of this process.

    Raises:
        ConfigError: another job is writing to the folder.
    """

    def __init__(self, folder: Path, wait_s: float = RESTART_WAIT_S) -> None:
        path = folder / LOCK_NAME

        def holder_wait_s(text: bytes) -> float:
            """Return how many seconds to wait for the holder of the lock; 0 if it belongs to another job."""
            holder = _parse_holder(text)
            return (wait_s if _is_same_job(holder) else 0.0) if holder else _UNNAMED_WAIT_S

        def locked_message(text: bytes) -> str:
            return (
                f"only one job at a time may write to {folder}, got {_format_holder(_parse_holder(text))}, which holds "
                f"{path}. Set --save to another folder, or end that job. If it no longer exists, delete the file"
            )

        try:
            self._lock = FileLock(
                path,
                "lockf",
                wait_s=holder_wait_s,
                describe=locked_message,
                error=ConfigError,
                without_lock=_is_abandoned,
            )
            if holder := _parse_holder(self._lock.previous_text):
                log.info(f"{path} is stale: {_format_holder(holder)} has exited; taking over the lock")
            self._lock.write(json.dumps(_describe_process()).encode() + b"\n")
        except OSError as error:
            raise ConfigError(
                f"{path} must be a file that can be written and locked, got: {error}. Set --save to another folder, or "
                "remove the file"
            ) from error

    def release(self) -> None:
        """Release the lock; further calls have no effect."""
        self._lock.release()


def _describe_process() -> dict[str, Any]:
    """Describe this process for ``run.lock``."""
    return {
        "host": platform.node(),
        "pid": os.getpid(),
        "started": _process_start_time(os.getpid()),
        "since": time.strftime("%Y-%m-%d %H:%M:%S"),
        "job": _shared_job_id(),
    }


def _shared_job_id() -> str | None:
    """Return the id that all starts of one job share: the launcher's, or else SLURM's."""
    return job_id() or os.environ.get("SLURM_JOB_ID")


def _is_same_job(holder: dict[str, Any]) -> bool:
    return holder.get("job") is not None and holder["job"] == _shared_job_id()


def _is_abandoned(error: OSError, text: bytes) -> bool:
    """Return True if the file system has no locks, and the holder named in the file is not alive."""
    holder = _parse_holder(text)
    return error.errno in _NO_LOCK_ERRORS and not (holder and _may_live(holder))


def _may_live(holder: dict[str, Any]) -> bool:
    """Return True if the process in ``holder`` may be alive; used on file systems without locks."""
    if holder.get("host") == platform.node():
        pid = holder.get("pid")
        started = _process_start_time(pid) if isinstance(pid, int) and pid != os.getpid() else None
        return started is not None and started == holder.get("started")
    return not _is_same_job(holder)


def _process_start_time(pid: int) -> str | None:
    """Read the start time of process ``pid`` in clock ticks since boot; None if it has exited or is a zombie."""
    try:
        stat_fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if stat_fields[0] in "ZX" else stat_fields[19]


def _format_holder(holder: dict[str, Any]) -> str:
    if not holder:
        return "a process that has not written its name yet"
    return f"host {holder.get('host')}, pid {holder.get('pid')}, since {holder.get('since')}"


def _parse_holder(text: bytes) -> dict[str, Any]:
    try:
        holder = json.loads(text or b"{}")
    except ValueError:
        return {"host": "unknown"}
    return holder if isinstance(holder, dict) else {}
