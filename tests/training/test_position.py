"""What a rank notes of where it is outlives it."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from megatron.training import failure
from tests.helpers.harness import fork_ranks


def test_a_page_holds_what_a_killed_rank_noted_last(tmp_path):
    codes, _, _ = fork_ranks(1, note_and_die, str(tmp_path / "failure"), init=False)
    assert codes == [-signal.SIGKILL]
    page = Path(failure.page_of(str(tmp_path / "failure"), 0)).read_bytes()
    found = failure.read_position(page)
    assert found[:3] == ("stage 1, tensor 0, data 2", "step 7, forward of micro-batch 3", failure.RUNNING)
    assert 0 < found.said_at <= time.monotonic()


def note_and_die(rank: int, failure_file: str) -> None:
    os.environ["MEGATRON_FAILURE_FILE"] = failure_file
    failure.open_page()
    failure.name_rank("rank 0 (stage 1, tensor 0, data 2)")
    failure.heartbeat_note("something with a longer text than the next")
    failure.heartbeat_note("step 7, forward of micro-batch 3")
    failure.note_state(failure.RUNNING)
    failure.note_reporting()
    os.kill(os.getpid(), signal.SIGKILL)


def test_without_a_launcher_the_process_itself_knows(monkeypatch):
    monkeypatch.delenv("MEGATRON_FAILURE_FILE", raising=False)
    monkeypatch.setattr(failure, "_page", bytearray(failure.SIZE))
    failure.open_page()
    assert failure.heartbeat_now() is None
    failure.heartbeat_note("ä" * failure.SIZE)  # longer than the page
    assert (failure.heartbeat_now() or "").startswith("äää")


def test_progress_is_told_to_a_launcher_alone(tmp_path, monkeypatch):
    monkeypatch.delenv(failure.PROGRESS_FILE_VARIABLE, raising=False)
    failure.note_committed_step(3)
    assert failure.committed_step(tmp_path / "progress") is None
    monkeypatch.setenv(failure.PROGRESS_FILE_VARIABLE, str(tmp_path / "progress"))
    failure.note_committed_step(3)
    failure.note_committed_step(40)
    assert failure.committed_step(tmp_path / "progress") == 40
    assert [path.name for path in tmp_path.iterdir()] == ["progress"]
