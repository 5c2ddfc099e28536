"""One job at a time in a run folder (row K14)."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from megatron.errors import ConfigError
from megatron.training import run_lock
from megatron.training.run_lock import LOCK_NAME, RunLock
from tests.helpers.runs import launch_script, make_flags


def run_in_child(fn: Any, *, stay_alive: bool = False) -> int:
    """Call ``fn`` in a forked process and wait until it is done; with ``stay_alive`` it lives on. Return its id."""
    readable, writable = os.pipe()
    child = os.fork()
    if not child:
        exit_code = 0
        try:
            fn()
            os.write(writable, b".")
            if stay_alive:
                signal.pause()
        except ConfigError:
            exit_code = 2
        finally:
            os._exit(exit_code)
    os.close(writable)
    os.read(readable, 1)
    os.close(readable)
    return child


def child_exit_code(fn: Any) -> int:
    """Return the exit code of a forked process that calls ``fn``: 2 where it is refused."""
    return os.waitstatus_to_exitcode(os.waitpid(run_in_child(fn), 0)[1])


def kill_child(child: int) -> None:
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def test_second_job_error_names_lock_holder(tmp_path: Path) -> None:
    child = run_in_child(lambda: RunLock(tmp_path), stay_alive=True)
    try:
        with pytest.raises(ConfigError, match=rf"host .+, pid {child}, since .*--save.*delete the file"):
            RunLock(tmp_path)
    finally:
        kill_child(child)


def test_lock_of_killed_job_is_stale(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    monkeypatch.setattr(run_lock.log, "info", lines.append)
    child = run_in_child(lambda: RunLock(tmp_path), stay_alive=True)
    kill_child(child)
    assert (tmp_path / LOCK_NAME).exists()
    lock = RunLock(tmp_path)
    assert len(lines) == 1 and f"pid {child}" in lines[0] and "stale" in lines[0]
    assert child_exit_code(lambda: RunLock(tmp_path)) == 2
    lock.release()
    lock.release()
    assert not (tmp_path / LOCK_NAME).exists()
    assert child_exit_code(lambda: RunLock(tmp_path)) == 0


def test_forked_worker_does_not_hold_lock(tmp_path: Path) -> None:
    workers: list[int] = []
    readable, writable = os.pipe()

    def lock_and_fork() -> None:
        RunLock(tmp_path)
        worker = os.fork()
        if not worker:
            signal.pause()
        os.write(writable, str(worker).encode())

    kill_child(run_in_child(lock_and_fork, stay_alive=True))
    workers.append(int(os.read(readable, 20)))
    try:
        RunLock(tmp_path).release()
    finally:
        os.kill(workers[0], signal.SIGKILL)
        os.close(readable)
        os.close(writable)


def test_restart_waits_for_previous_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGATRON_RUN_ID", "job-1")
    child = run_in_child(lambda: RunLock(tmp_path), stay_alive=True)
    monkeypatch.setattr(run_lock.time, "sleep", lambda seconds: kill_child(child))
    RunLock(tmp_path).release()
    other_child = run_in_child(lambda: RunLock(tmp_path), stay_alive=True)
    try:
        with pytest.raises(ConfigError, match=f"pid {other_child}"):
            RunLock(tmp_path, wait_s=0.0)
        monkeypatch.setenv("MEGATRON_RUN_ID", "job-2")
        with pytest.raises(ConfigError, match=f"pid {other_child}"):
            RunLock(tmp_path)
    finally:
        kill_child(other_child)


@pytest.mark.parametrize("writes_name", [True, False])
def test_unnamed_lock_holder_is_polled(writes_name: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    child = run_in_child(lambda: RunLock(tmp_path), stay_alive=True)
    text = (tmp_path / LOCK_NAME).read_bytes()
    os.truncate(tmp_path / LOCK_NAME, 0)
    current_time = [0.0]
    monkeypatch.setattr(run_lock.time, "monotonic", lambda: current_time[0])

    def sleep(seconds: float) -> None:
        current_time[0] += 0.3
        if writes_name and current_time[0] > 0.5:
            (tmp_path / LOCK_NAME).write_bytes(text)

    monkeypatch.setattr(run_lock.time, "sleep", sleep)
    try:
        with pytest.raises(ConfigError, match=f"pid {child}" if writes_name else "not written its name yet"):
            RunLock(tmp_path)
    finally:
        kill_child(child)


def test_unusable_lock_file_is_named_in_error(tmp_path: Path) -> None:
    (tmp_path / LOCK_NAME).mkdir()
    with pytest.raises(
        ConfigError, match=f"{LOCK_NAME} must be a file that can be written and locked, got: .*directory"
    ):
        RunLock(tmp_path)


def test_lock_is_reacquired_if_file_was_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original_lockf, calls = fcntl.lockf, []

    def lock_after_removal(descriptor: int, operation: int) -> None:
        if not calls:
            (tmp_path / LOCK_NAME).unlink()
        calls.append(descriptor)
        original_lockf(descriptor, operation)

    monkeypatch.setattr(fcntl, "lockf", lock_after_removal)
    lock = RunLock(tmp_path)
    assert (tmp_path / LOCK_NAME).exists() and len(calls) == 2
    lock.release()


@pytest.mark.parametrize(
    ("changed_fields", "can_lock"),
    [
        ({}, False),
        ({"pid": 2**22 + 1}, True),  # beyond what Linux gives
        ({"started": "1"}, True),  # the number went to another process
        ({"host": "elsewhere"}, False),
        ({"host": "elsewhere", "job": "job-1"}, True),
    ],
)
def test_holder_text_decides_without_file_locks(
    changed_fields: dict[str, Any], can_lock: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def raise_no_locks(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "no locks available")

    monkeypatch.setattr(fcntl, "lockf", raise_no_locks)
    child = run_in_child(lambda: RunLock(tmp_path), stay_alive=True)
    try:
        content = json.loads((tmp_path / LOCK_NAME).read_bytes())
        (tmp_path / LOCK_NAME).write_text(json.dumps({**content, **changed_fields}))
        monkeypatch.setenv("MEGATRON_RUN_ID", "job-1")
        if can_lock:
            RunLock(tmp_path).release()
        else:
            with pytest.raises(ConfigError, match="one job at a time"):
                RunLock(tmp_path)
    finally:
        kill_child(child)


def test_second_job_exits_with_code_2_and_leaves_folder_unchanged(corpus: Path, tmp_path: Path) -> None:
    folder, log = tmp_path / "run", tmp_path / "log"
    child = run_in_child(lambda: RunLock(folder), stay_alive=True)
    try:
        argv = make_flags(corpus, folder, "--train-iters 1")
        assert launch_script(2, argv, log) == [2, 2]
        assert log.read_text().count("one job at a time") == 1
        assert {path.name for path in folder.iterdir()} == {LOCK_NAME}
    finally:
        kill_child(child)
