"""The checkpoint benchmark runs every contender, checks loaded tensors and divides the right times."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks import checkpoint
from benchmarks.checkpoint import bars_of, check_load


def test_bars_are_ratios_of_named_times() -> None:
    seconds = {"torch.save + fsync": [2.0], "save": [1.0], "stall of an async save": [0.5], "verification": [0.1]}
    assert [bar.quartiles[1] for bar in bars_of(seconds, 50.0)] == [0.5, 0.25, 0.1, 0.01]


def test_incomplete_load_raises() -> None:
    tensors = [torch.ones(4), torch.full((3,), 2.0)]
    copies = [tensor.clone() for tensor in tensors]
    check_load(tensors, lambda: [tensor.copy_(copy) for tensor, copy in zip(tensors, copies, strict=True)])
    with pytest.raises(RuntimeError, match="did not load the state that it saved"):
        check_load(tensors, lambda: tensors[0].copy_(copies[0]))


def test_smoke_run_reports_all_measurements(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--smoke", "--ranks", "1", "--folder", str(tmp_path), "--json", str(tmp_path / "out.json")]
    team = checkpoint.main(flags)["teams"]["1"]
    assert {"save", "verification", "torch.save + fsync", "stall of an async save", "reshard"} <= set(team["seconds"])
    assert all(len(values) == 1 and values[0] > 0 for values in team["seconds"].values())
    for name in ("ours", "torch"):
        assert team["state_bytes"] <= team["files_bytes"][name] <= 1.1 * team["state_bytes"], name
    assert json.loads((tmp_path / "out.json").read_text())["teams"]["1"]["files_bytes"] == team["files_bytes"]
    assert [path.name for path in tmp_path.iterdir()] == ["out.json"]
    assert "verification / save" in capsys.readouterr().out
