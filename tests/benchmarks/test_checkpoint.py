"""The benchmark of checkpoints runs every contender, checks what they load, and holds times to its bars."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks import checkpoint
from benchmarks.checkpoint import Contenders, State, bars_of
from megatron.mpu.groups import single_grid


def test_each_bar_divides_what_it_says() -> None:
    seconds = {"torch.save + fsync": [2.0], "save": [1.0], "stall of an async save": [0.5], "verification": [0.1]}
    assert [bar.quartiles[1] for bar in bars_of(seconds, 50.0)] == [0.5, 0.25, 0.1, 0.01]


def test_a_load_that_leaves_something_out_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = State(1 << 20, single_grid())
    contenders = Contenders(state, single_grid(), tmp_path, tmp_path)
    assert set(contenders.ours()) == {"save", "verification", "load", "verification + load"}
    monkeypatch.setattr(torch, "load", lambda path, weights_only: dict.fromkeys(state.tensors(), torch.tensor(0.0)))
    with pytest.raises(RuntimeError, match="did not load the state that it saved"):
        contenders.torch()


def test_a_smoke_run_tells_every_measure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = checkpoint.main(["--smoke", "--ranks", "1", "--folder", str(tmp_path), "--json", str(tmp_path / "out.json")])
    team = told["teams"]["1"]
    assert {"save", "verification", "reshard (verification + load)"} <= set(team["seconds"])
    assert all(len(values) == 1 and values[0] > 0 for values in team["seconds"].values())
    for name in ("ours", "torch"):
        assert team["state_bytes"] <= team["files_bytes"][name] <= 1.1 * team["state_bytes"], name
    assert json.loads((tmp_path / "out.json").read_text())["teams"] == json.loads(json.dumps(told["teams"]))
    assert [path.name for path in tmp_path.iterdir()] == ["out.json"]
    assert "verification / save" in capsys.readouterr().out
