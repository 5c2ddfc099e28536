"""What a rank notes of where it is outlives it."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from megatron.runtime import progress_file, rank_status
from tests.helpers.harness import fork_ranks


def test_status_buffer_survives_killed_rank(tmp_path):
    codes, _, _ = fork_ranks(1, report_status_and_die, str(tmp_path / "failure"), init=False)
    assert codes == [-signal.SIGKILL]
    buffer = Path(rank_status.status_path(str(tmp_path / "failure"), 0)).read_bytes()
    position = rank_status.parse_status(buffer)
    assert position[:3] == ("stage 1, tensor 0, data 2", "step 7, forward of micro-batch 3", rank_status.RUNNING)
    assert 0 < position.reported_at <= time.monotonic()


def report_status_and_die(rank: int, failure_file: str) -> None:
    os.environ["MEGATRON_FAILURE_FILE"] = failure_file
    rank_status.open_status_file()
    rank_status.write_coordinates("rank 0 (stage 1, tensor 0, data 2)")
    rank_status.write_operation("something with a longer text than the next")
    rank_status.write_operation("step 7, forward of micro-batch 3")
    rank_status.write_state(rank_status.RUNNING)
    rank_status.write_report_time()
    os.kill(os.getpid(), signal.SIGKILL)


def test_status_is_stored_in_process_without_launcher(monkeypatch):
    monkeypatch.delenv("MEGATRON_FAILURE_FILE", raising=False)
    monkeypatch.setattr(rank_status, "_buffer", bytearray(rank_status.BUFFER_BYTES))
    rank_status.open_status_file()
    assert rank_status.current_operation() is None
    rank_status.write_operation("ä" * rank_status.BUFFER_BYTES)  # longer than the page
    assert (rank_status.current_operation() or "").startswith("äää")


def test_progress_is_reported_only_to_launcher(tmp_path, monkeypatch):
    monkeypatch.delenv(progress_file.PROGRESS_FILE_VARIABLE, raising=False)
    progress_file.report_committed_step(3)
    assert progress_file.read_committed_step(tmp_path / "progress") is None
    monkeypatch.setenv(progress_file.PROGRESS_FILE_VARIABLE, str(tmp_path / "progress"))
    progress_file.report_committed_step(3)
    progress_file.report_committed_step(40)
    assert progress_file.read_committed_step(tmp_path / "progress") == 40
    assert [path.name for path in tmp_path.iterdir()] == ["progress"]
