"""A lock on a file, of both kinds: who owns it, who is waited for, and what a file system without locks leaves."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import pytest

from megatron import file_lock
from megatron.file_lock import FileLock

LockType = Literal["lockf", "flock"]
every_lock_type = pytest.mark.parametrize("lock_type", ["lockf", "flock"])
AcquireLock = Callable[[], object]


class HeldError(Exception):
    """What these locks raise."""


def make_lock(path: Path, lock_type: LockType, wait_s: float = 0.0, *, may_continue: bool = False) -> FileLock:
    return FileLock(
        path,
        lock_type,
        wait_s=lambda text: wait_s,
        describe=lambda text: f"held by {text.decode()}",
        error=HeldError,
        without_lock=lambda error, text: may_continue,
    )


@pytest.fixture
def start_holder() -> Iterator[Callable[[AcquireLock], int]]:
    """Start a process that enters, says so, and stays; it is ended after the test."""
    children: list[int] = []

    def start(acquire: AcquireLock) -> int:
        readable, writable = os.pipe()
        child = os.fork()
        if not child:
            try:
                acquire()
                os.write(writable, b".")
                signal.pause()
            finally:
                os._exit(1)
        children.append(child)
        os.close(writable)
        assert os.read(readable, 1) == b".", "it could not enter"
        os.close(readable)
        return child

    yield start
    for child in children:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


@every_lock_type
def test_error_names_holder_and_exit_releases_lock(
    lock_type: LockType, tmp_path: Path, start_holder: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "folder" / "lock"
    holder = start_holder(lambda: make_lock(path, lock_type).write(b"me"))
    with pytest.raises(HeldError, match="held by me"):
        make_lock(path, lock_type)

    def end_holder(_: float) -> None:
        os.kill(holder, signal.SIGKILL)
        os.waitid(os.P_PID, holder, os.WEXITED | os.WNOWAIT)

    monkeypatch.setattr(file_lock.time, "sleep", end_holder)
    acquired = make_lock(path, lock_type, wait_s=60.0)
    assert acquired.previous_text == b"me"
    acquired.write(b"you")
    assert path.read_bytes() == b"you"
    acquired.release()
    acquired.release()
    assert not path.exists()


@every_lock_type
def test_forked_child_keeps_flock_but_not_lockf(lock_type: LockType, tmp_path: Path) -> None:
    readable, writable = os.pipe()
    holder = os.fork()
    if not holder:
        make_lock(tmp_path / "lock", lock_type)
        worker = os.fork()
        if worker:
            os.write(writable, str(worker).encode())
        signal.pause()
    worker = int(os.read(readable, 20))
    os.kill(holder, signal.SIGKILL)
    os.waitpid(holder, 0)
    try:
        if lock_type == "flock":
            with pytest.raises(HeldError):
                make_lock(tmp_path / "lock", lock_type)
        else:
            make_lock(tmp_path / "lock", lock_type).release()
    finally:
        os.kill(worker, signal.SIGKILL)
        os.close(readable)
        os.close(writable)


@every_lock_type
def test_lock_recreates_removed_file_and_folder(
    lock_type: LockType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, function = tmp_path / "folder" / "lock", getattr(fcntl, lock_type)
    calls: list[int] = []

    def lock_after_removal(descriptor: int, operation: int) -> None:
        if not calls:
            path.unlink()
            path.parent.rmdir()
        calls.append(descriptor)
        function(descriptor, operation)

    monkeypatch.setattr(fcntl, lock_type, lock_after_removal)
    acquired = make_lock(path, lock_type)
    assert path.exists() and len(calls) == 2
    acquired.release(removes_file=False)
    assert path.exists()


@every_lock_type
@pytest.mark.parametrize("may_continue", [True, False])
def test_caller_decides_if_filesystem_has_no_locks(
    lock_type: LockType, may_continue: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_locks(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "no locks available")

    (tmp_path / "lock").write_bytes(b"another")
    monkeypatch.setattr(fcntl, lock_type, no_locks)
    if may_continue:
        assert make_lock(tmp_path / "lock", lock_type, may_continue=True).previous_text == b"another"
    else:
        with pytest.raises(HeldError, match="held by another"):
            make_lock(tmp_path / "lock", lock_type)


def test_lock_raises_os_error_if_file_cannot_be_created(tmp_path: Path) -> None:
    (tmp_path / "lock").symlink_to(tmp_path / "nowhere" / "lock")
    with pytest.raises(FileNotFoundError):
        make_lock(tmp_path / "lock", "flock")
    (tmp_path / "folder").mkdir()
    with pytest.raises(IsADirectoryError):
        make_lock(tmp_path / "folder", "lockf")
