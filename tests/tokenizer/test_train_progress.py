"""Progress of training a vocabulary: what is read, then what is trained; silent once it has ended."""

from __future__ import annotations

import threading
import time

import pytest

from megatron import log
from megatron.tokenizer import train_progress
from megatron.tokenizer.train_progress import TrainingProgress


def test_training_progress_reports_reading_then_training(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    monkeypatch.setattr(log, "info", lines.append)
    monkeypatch.setattr(train_progress, "INTERVAL_S", 0.001)

    def wait_for(suffix: str) -> None:
        deadline = time.monotonic() + 30
        while not any(line.endswith(suffix) for line in lines):
            assert time.monotonic() < deadline, lines[-3:]
            time.sleep(0.001)

    with TrainingProgress("a vocabulary") as progress:
        texts = progress.reading(["a" * 600_000, "é" * 350_000])
        next(texts)
        wait_for(": read 1 document, 0.6 MB")
        next(texts)
        wait_for(": read 2 documents, 1.3 MB")
        assert next(texts, None) is None
        wait_for(": training a vocabulary on 2 documents, 1.3 MB")
    num_lines = len(lines)
    assert not any(thread.name == "training progress" for thread in threading.enumerate())
    time.sleep(0.01)
    assert len(lines) == num_lines


def test_short_training_logs_nothing_and_errors_stop_reporting(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    monkeypatch.setattr(log, "info", lines.append)
    with pytest.raises(KeyError), TrainingProgress("a vocabulary"):
        raise KeyError
    assert lines == []
