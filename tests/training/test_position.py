"""What a rank notes of where it is outlives it."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from megatron.runtime import progress_file, rank_status
from tests.helpers.harness import fork_ranks


def test_a_page_holds_what_a_killed_rank_noted_last(tmp_path):
    codes, _, _ = fork_ranks(1, note_and_die, str(tmp_path / "failure"), init=False)
    assert codes == [-signal.SIGKILL]
    page = Path(rank_status.page_of(str(tmp_path / "failure"), 0)).read_bytes()
    found = rank_status.read_position(page)
    assert found[:3] == ("stage 1, tensor 0, data 2", "step 7, forward of micro-batch 3", rank_status.RUNNING)
    assert 0 < found.said_at <= time.monotonic()


def note_and_die(rank: int, failure_file: str) -> None:
    os.environ["MEGATRON_FAILURE_FILE"] = failure_file
    rank_status.open_page()
    rank_status.name_rank("rank 0 (stage 1, tensor 0, data 2)")
    rank_status.heartbeat_note("something with a longer text than the next")
    rank_status.heartbeat_note("step 7, forward of micro-batch 3")
    rank_status.note_state(rank_status.RUNNING)
    rank_status.note_reporting()
    os.kill(os.getpid(), signal.SIGKILL)


def test_without_a_launcher_the_process_itself_knows(monkeypatch):
    monkeypatch.delenv("MEGATRON_FAILURE_FILE", raising=False)
    monkeypatch.setattr(rank_status, "_page", bytearray(rank_status.SIZE))
    rank_status.open_page()
    assert rank_status.heartbeat_now() is None
    rank_status.heartbeat_note("ä" * rank_status.SIZE)  # longer than the page
    assert (rank_status.heartbeat_now() or "").startswith("äää")


def test_progress_is_told_to_a_launcher_alone(tmp_path, monkeypatch):
    monkeypatch.delenv(progress_file.PROGRESS_FILE_VARIABLE, raising=False)
    progress_file.note_committed_step(3)
    assert progress_file.committed_step(tmp_path / "progress") is None
    monkeypatch.setenv(progress_file.PROGRESS_FILE_VARIABLE, str(tmp_path / "progress"))
    progress_file.note_committed_step(3)
    progress_file.note_committed_step(40)
    assert progress_file.committed_step(tmp_path / "progress") == 40
    assert [path.name for path in tmp_path.iterdir()] == ["progress"]
