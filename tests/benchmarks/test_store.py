"""The benchmark of the wait for data: requests of its store take the latency, and each contender has a row."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from benchmarks import store
from megatron import object_store


def test_each_request_takes_the_latency(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").write_bytes(b"0123456789")
    monkeypatch.setattr(store.SlowFiles, "latency_s", 0.05)
    began = time.perf_counter()
    assert object_store.read_range(f"slow://{tmp_path}/a", 2, 5) == b"234"
    assert time.perf_counter() - began >= 0.05


def test_a_small_run_has_a_row_of_each_contender(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(store, "SEQ_LENGTH", 64)
    flags = "--latency-ms 0.1 --step-ms 1 --steps 2 --rounds 1 --tokens 20000 --workers 0".split()
    assert store.main([*flags, "--json", str(tmp_path / "store.json")]) == 0
    waits = json.loads((tmp_path / "store.json").read_text())["waits_s"]
    assert len(waits) == 4 and all(name in capsys.readouterr().out for name in list(waits)[:1])
    assert all(first > 0 and then > 0 for rounds in waits.values() for first, then in rounds)
