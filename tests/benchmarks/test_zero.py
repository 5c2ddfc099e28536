"""The benchmark of ZeRO runs ours and DeepSpeed's on one model, counts bytes and holds ratios within rounds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import zero
from benchmarks.zero import Contender, contenders, deepspeed_config, expected


def test_ours_and_theirs_take_part_in_every_stage() -> None:
    names = [each.name for each in contenders([0, 3], offload=True)]
    assert names == ["ours 0", "DeepSpeed 0", "ours 3", "DeepSpeed 3", "ours 3 offload", "DeepSpeed 3 offload"]
    case = zero.case_of(zero.parse_args(["--smoke"]), "bf16")
    config = deepspeed_config(Contender("DeepSpeed", 3, offloads=True), case)
    assert config["bf16"] == {"enabled": True} and config["zero_optimization"]["offload_param"] == {"device": "cpu"}


def test_formulas_fall_from_stage_to_stage() -> None:
    case = zero.case_of(zero.parse_args(["--smoke"]), "bf16")
    kept = [expected(Contender("ours", stage), case)[0] for stage in range(4)]
    assert kept[0] > kept[1] == kept[2] > kept[3]


def test_a_ratio_is_that_of_the_same_round_and_kind() -> None:
    records = {
        name: zero.Record(seconds=[1.0 * factor, 4.0 * factor]) for name, factor in (("ours 2", 1), ("DeepSpeed 2", 2))
    }
    assert zero.ratios(records, "ours 2") == [0.5, 0.5]
    assert zero.ratios({"ours 2": records["ours 2"]}, "ours 2") == []


def test_other_losses_end_the_run_and_a_peer_that_fails_is_told() -> None:
    case = zero.case_of(zero.parse_args(["--smoke"]), "fp32")
    records = {"ours 1": zero.Record(losses=[4.0]), "DeepSpeed 1": zero.Record(losses=[4.1])}
    with pytest.raises(RuntimeError, match="the first losses of fp32 must agree"):
        zero.check_losses(case, records)
    assert "failed: no such thing" in zero.table(case, {"DeepSpeed 3": zero.Record(failed="no such thing")})


def test_wrong_sizes_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for words, told in (("--hidden-size 50", "multiple of 32, got 50"), ("--rounds 0", "must be at least 1")):
        with pytest.raises(SystemExit, match="2"):
            zero.parse_args(words.split())
        assert told in capsys.readouterr().err


@pytest.mark.slow  # ranks of their own with DeepSpeed; tests/training/test_zero_bytes.py holds ours to the formulas
@pytest.mark.parametrize("stages", ["3", "0 1 2"])
def test_a_smoke_run_counts_what_each_keeps(stages: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = f"--smoke --stages {stages} --no-offload --micro-batches 1 --json {tmp_path / 'out.json'}"
    told = zero.main(words.split())["cases"]["fp32"]
    assert set(told) == {f"{whose} {stage}" for whose in ("ours", "DeepSpeed") for stage in stages.split()}
    for name in (name for name in told if name.startswith("ours")):
        record = told[name]
        assert not record["failed"] and len(record["seconds"]) == 1
        assert 0.95 * record["expected_kept"] <= record["kept"] <= 1.2 * record["expected_kept"] + 2**14, name
    assert json.loads((tmp_path / "out.json").read_text())["cases"]["fp32"] == json.loads(json.dumps(told))
    assert "ours" in capsys.readouterr().out
