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

Kind = Literal["lockf", "flock"]
KINDS = pytest.mark.parametrize("kind", ["lockf", "flock"])
Enter = Callable[[], object]


class HeldError(Exception):
    """What these locks raise."""


def lock(path: Path, kind: Kind, wait_s: float = 0.0, *, may_go_on: bool = False) -> FileLock:
    return FileLock(
        path,
        kind,
        wait_s=lambda text: wait_s,
        describe=lambda text: f"held by {text.decode()}",
        error=HeldError,
        without_lock=lambda error, text: may_go_on,
    )


@pytest.fixture
def started() -> Iterator[Callable[[Enter], int]]:
    """Start a process that enters, says so, and stays; it is ended after the test."""
    children: list[int] = []

    def start(enter: Enter) -> int:
        readable, writable = os.pipe()
        child = os.fork()
        if not child:
            try:
                enter()
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


@KINDS
def test_the_holder_is_told_and_its_end_frees_the_file(
    kind: Kind, tmp_path: Path, started: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "folder" / "lock"
    holder = started(lambda: lock(path, kind).write(b"me"))
    with pytest.raises(HeldError, match="held by me"):
        lock(path, kind)

    def end_holder(_: float) -> None:
        os.kill(holder, signal.SIGKILL)
        os.waitid(os.P_PID, holder, os.WEXITED | os.WNOWAIT)

    monkeypatch.setattr(file_lock.time, "sleep", end_holder)
    taken = lock(path, kind, wait_s=60.0)
    assert taken.left == b"me"
    taken.write(b"you")
    assert path.read_bytes() == b"you"
    taken.release()
    taken.release()
    assert not path.exists()


@KINDS
def test_what_the_holder_has_forked_holds_a_flock_and_no_lockf(kind: Kind, tmp_path: Path) -> None:
    readable, writable = os.pipe()
    holder = os.fork()
    if not holder:
        lock(tmp_path / "lock", kind)
        worker = os.fork()
        if worker:
            os.write(writable, str(worker).encode())
        signal.pause()
    worker = int(os.read(readable, 20))
    os.kill(holder, signal.SIGKILL)
    os.waitpid(holder, 0)
    try:
        if kind == "flock":
            with pytest.raises(HeldError):
                lock(tmp_path / "lock", kind)
        else:
            lock(tmp_path / "lock", kind).release()
    finally:
        os.kill(worker, signal.SIGKILL)
        os.close(readable)
        os.close(writable)


@KINDS
def test_a_file_and_folder_that_are_removed_meanwhile_are_made_again(
    kind: Kind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, function = tmp_path / "folder" / "lock", getattr(fcntl, kind)
    calls: list[int] = []

    def lock_after_the_holder_left(descriptor: int, operation: int) -> None:
        if not calls:
            path.unlink()
            path.parent.rmdir()
        calls.append(descriptor)
        function(descriptor, operation)

    monkeypatch.setattr(fcntl, kind, lock_after_the_holder_left)
    taken = lock(path, kind)
    assert path.exists() and len(calls) == 2
    taken.release(removes_file=False)
    assert path.exists()


@KINDS
@pytest.mark.parametrize("may_go_on", [True, False])
def test_without_locks_the_caller_decides(
    kind: Kind, may_go_on: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_locks(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "no locks available")

    (tmp_path / "lock").write_bytes(b"another")
    monkeypatch.setattr(fcntl, kind, no_locks)
    if may_go_on:
        assert lock(tmp_path / "lock", kind, may_go_on=True).left == b"another"
    else:
        with pytest.raises(HeldError, match="held by another"):
            lock(tmp_path / "lock", kind)


def test_a_file_that_cannot_be_made_is_an_error_of_the_system(tmp_path: Path) -> None:
    (tmp_path / "lock").symlink_to(tmp_path / "nowhere" / "lock")
    with pytest.raises(FileNotFoundError):
        lock(tmp_path / "lock", "flock")
    (tmp_path / "folder").mkdir()
    with pytest.raises(IsADirectoryError):
        lock(tmp_path / "folder", "lockf")
