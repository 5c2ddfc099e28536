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
from megatron.training.run_lock import NAME, RunLock
from tests.helpers.runs import flags, start_script


def in_child(act: Any, *, stays: bool = False) -> int:
    """Call ``act`` in a forked process and wait until it is done; with ``stays`` it lives on. Return its id."""
    readable, writable = os.pipe()
    child = os.fork()
    if not child:
        code = 0
        try:
            act()
            os.write(writable, b".")
            if stays:
                signal.pause()
        except ConfigError:
            code = 2
        finally:
            os._exit(code)
    os.close(writable)
    os.read(readable, 1)
    os.close(readable)
    return child


def code_of_child(act: Any) -> int:
    """Return the exit code of a forked process that calls ``act``: 2 where it is refused."""
    return os.waitstatus_to_exitcode(os.waitpid(in_child(act), 0)[1])


def end(child: int) -> None:
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def test_the_second_job_is_told_who_the_first_one_is(tmp_path: Path) -> None:
    child = in_child(lambda: RunLock(tmp_path), stays=True)
    try:
        with pytest.raises(ConfigError, match=rf"host .+, pid {child}, since .*--save.*delete the file"):
            RunLock(tmp_path)
    finally:
        end(child)


def test_the_lock_of_a_killed_job_is_stale(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    monkeypatch.setattr(run_lock.log, "info", lines.append)
    child = in_child(lambda: RunLock(tmp_path), stays=True)
    end(child)
    assert (tmp_path / NAME).exists()
    lock = RunLock(tmp_path)
    assert len(lines) == 1 and f"pid {child}" in lines[0] and "stale" in lines[0]
    assert code_of_child(lambda: RunLock(tmp_path)) == 2
    lock.release()
    lock.release()
    assert not (tmp_path / NAME).exists()
    assert code_of_child(lambda: RunLock(tmp_path)) == 0


def test_what_a_rank_has_forked_does_not_hold_its_lock(tmp_path: Path) -> None:
    workers: list[int] = []
    readable, writable = os.pipe()

    def lock_and_fork() -> None:
        RunLock(tmp_path)
        worker = os.fork()
        if not worker:
            signal.pause()
        os.write(writable, str(worker).encode())

    end(in_child(lock_and_fork, stays=True))
    workers.append(int(os.read(readable, 20)))
    try:
        RunLock(tmp_path).release()
    finally:
        os.kill(workers[0], signal.SIGKILL)
        os.close(readable)
        os.close(writable)


def test_a_restart_waits_for_the_start_before_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGATRON_RUN_ID", "job-1")
    child = in_child(lambda: RunLock(tmp_path), stays=True)
    monkeypatch.setattr(run_lock.time, "sleep", lambda seconds: end(child))
    RunLock(tmp_path).release()
    other = in_child(lambda: RunLock(tmp_path), stays=True)
    try:
        with pytest.raises(ConfigError, match=f"pid {other}"):
            RunLock(tmp_path, wait_s=0.0)
        monkeypatch.setenv("MEGATRON_RUN_ID", "job-2")
        with pytest.raises(ConfigError, match=f"pid {other}"):
            RunLock(tmp_path)
    finally:
        end(other)


@pytest.mark.parametrize("says_it", [True, False])
def test_a_holder_that_has_not_said_yet_who_it_is_is_asked_again(
    says_it: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    child = in_child(lambda: RunLock(tmp_path), stays=True)
    text = (tmp_path / NAME).read_bytes()
    os.truncate(tmp_path / NAME, 0)
    now = [0.0]
    monkeypatch.setattr(run_lock.time, "monotonic", lambda: now[0])

    def sleep(seconds: float) -> None:
        now[0] += 0.3
        if says_it and now[0] > 0.5:
            (tmp_path / NAME).write_bytes(text)

    monkeypatch.setattr(run_lock.time, "sleep", sleep)
    try:
        with pytest.raises(ConfigError, match=f"pid {child}" if says_it else "not written its name yet"):
            RunLock(tmp_path)
    finally:
        end(child)


def test_trouble_with_the_file_names_it(tmp_path: Path) -> None:
    (tmp_path / NAME).mkdir()
    with pytest.raises(ConfigError, match=f"{NAME} must be a file that can be written and locked, got: .*directory"):
        RunLock(tmp_path)


def test_a_file_that_was_removed_meanwhile_is_no_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lockf, calls = fcntl.lockf, []

    def lock_after_the_holder_left(descriptor: int, operation: int) -> None:
        if not calls:
            (tmp_path / NAME).unlink()
        calls.append(descriptor)
        lockf(descriptor, operation)

    monkeypatch.setattr(fcntl, "lockf", lock_after_the_holder_left)
    lock = RunLock(tmp_path)
    assert (tmp_path / NAME).exists() and len(calls) == 2
    lock.release()


@pytest.mark.parametrize(
    ("changed", "may_enter"),
    [
        ({}, False),
        ({"pid": 2**22 + 1}, True),  # beyond what Linux gives
        ({"started": "1"}, True),  # the number went to another process
        ({"host": "elsewhere"}, False),
        ({"host": "elsewhere", "job": "job-1"}, True),
    ],
)
def test_without_locks_the_text_decides(
    changed: dict[str, Any], may_enter: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_locks(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "no locks available")

    monkeypatch.setattr(fcntl, "lockf", no_locks)
    child = in_child(lambda: RunLock(tmp_path), stays=True)
    try:
        content = json.loads((tmp_path / NAME).read_bytes())
        (tmp_path / NAME).write_text(json.dumps({**content, **changed}))
        monkeypatch.setenv("MEGATRON_RUN_ID", "job-1")
        if may_enter:
            RunLock(tmp_path).release()
        else:
            with pytest.raises(ConfigError, match="one job at a time"):
                RunLock(tmp_path)
    finally:
        end(child)


def test_a_second_job_ends_with_2_on_all_ranks_and_leaves_the_folder_alone(corpus: Path, tmp_path: Path) -> None:
    folder, log = tmp_path / "run", tmp_path / "log"
    child = in_child(lambda: RunLock(folder), stays=True)
    try:
        argv = flags(corpus, folder, "--train-iters 1")
        assert start_script(2, argv, log) == [2, 2]
        assert log.read_text().count("one job at a time") == 1
        assert {path.name for path in folder.iterdir()} == {NAME}
    finally:
        end(child)
