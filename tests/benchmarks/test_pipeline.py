"""The benchmark of pipelines runs from its options to its files."""

from __future__ import annotations

import json

import pytest

from benchmarks import pipeline


def run(folder, *more: str) -> dict:
    return pipeline.main(["--smoke", "--out", str(folder), "--start-method", "fork", *more])


@pytest.mark.slow  # tests/benchmarks/pipe tests the parts
def test_a_few_contenders_from_options_to_files(tmp_path) -> None:
    result = run(tmp_path, "--cases", "main", "--micro-batches", "8", "--cuts", "1", "--only", "side", "torch", "1f1b")
    rows = {each["contender"]: each for each in result["cases"]["m=8"]["rows"]}
    assert any(name.startswith("ours 1f1b") for name in rows) and any(name.startswith("torch") for name in rows)
    for name, each in rows.items():
        assert each["cut"] in name, "a contender has not the cut that its name says"
        assert each["losses"] == pytest.approx(rows["side by side"]["losses"], abs=1e-5)
    told = [bar["told"] for bar in result["cases"]["m=8"]["bars"]]
    assert any("faster 1F1B" in each for each in told) and any("simulate" in each for each in told)
    lines = [json.loads(line) for line in (tmp_path / "turns.jsonl").read_text().splitlines()]
    turns = [line for line in lines if line["what"] == "turn"]
    assert len(turns) == 3 * len(rows) and sum(turn["counts"] for turn in turns) == 2 * len(rows)
    assert (tmp_path / "table.txt").read_text().count("ours 1f1b") >= 2 and (tmp_path / "speed.png").exists()


@pytest.mark.slow
def test_a_t5_from_options_to_files(tmp_path) -> None:
    result = run(tmp_path, "--model", "t5", "--micro-batches", "8", "--cuts", "1", "--only", "side", "1f1b", "zb-h1")
    case = result["cases"]["t5 m=8"]
    rows = {each["contender"]: each for each in case["rows"]}
    assert {name.split()[1] for name in rows if name.startswith("ours")} == {"1f1b", "zb-h1"}
    for name, each in rows.items():
        assert each["cut"] in name, "a contender has not the cut that its name says"
        assert each["losses"] == pytest.approx(rows["side by side"]["losses"], abs=1e-5)
    told = " ".join(bar["told"] for bar in case["bars"])
    assert "two processes" in told and "apart by" in told and "simulate" in told and "memory" not in told


@pytest.mark.slow
def test_each_round_prints_its_table_and_the_look_at_memory_is_bounded(tmp_path, capsys) -> None:
    flags = ("--cases", "main", "--micro-batches", "8", "--cuts", "1", "--only", "ours 1f1b")
    result = run(tmp_path, *flags, "--look-s", "0")
    printed, progress = capsys.readouterr()
    assert printed.count("after 1 of 2 rounds, m=8:") == 1 and printed.count("tokens/s") == 2
    assert "no memory and no recorded steps after 0 s (--look-s): ours 1f1b" in progress
    [row] = result["cases"]["m=8"]["rows"]
    assert row["tokens_per_s"] > 0 and row["first_stage_bytes_before"] is None


def test_cases_of_the_other_model_are_refused(tmp_path, capsys) -> None:
    with pytest.raises(SystemExit):
        run(tmp_path, "--model", "t5", "--cases", "deep")
    assert "must be of main" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_every_contender_of_every_case_trains_the_same(tmp_path) -> None:
    result = run(tmp_path, "--micro-batches", "4", "--cuts", "2")
    assert set(result["cases"]) == {"m=4", "deep m=16", "tensor m=8"}
    kinds = {each["contender"].split()[0] for each in result["cases"]["m=4"]["rows"]}
    assert kinds == {"one", "side", "stock", "dualpipev", "torch", "ours"}
    schedules = {each["contender"].split()[1] for each in result["cases"]["m=4"]["rows"] if "ours" in each["contender"]}
    assert schedules == {"1f1b", "gpipe", "zb-h1", "interleaved", "zb-v", "dualpipev", "auto"}


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_every_schedule_trains_the_same_t5(tmp_path) -> None:
    result = run(tmp_path, "--model", "t5", "--micro-batches", "4", "--cuts", "2")
    rows = result["cases"]["t5 m=4"]["rows"]
    assert {each["contender"].split()[0] for each in rows} == {"one", "side", "ours"}
    schedules = {each["contender"].split()[1] for each in rows if "ours" in each["contender"]}
    assert schedules == {"1f1b", "gpipe", "zb-h1", "interleaved", "zb-v", "dualpipev", "auto"}


@pytest.mark.slow
def test_what_an_engine_takes_is_told_for_each_action_and_where(tmp_path, capsys) -> None:
    found = run(tmp_path, "--overhead", "--micro-batches", "4", "--only", "1f1b", "--profile", "ours 1f1b")
    assert set(found["m=4"]) == {"torch 1f1b", "ours 1f1b"}
    told = capsys.readouterr().out
    assert "for each of 16 actions" in told and "tottime" in told


def test_a_profile_is_of_the_engines_alone(tmp_path, capsys) -> None:
    with pytest.raises(SystemExit):
        run(tmp_path, "--profile", "ours 1f1b")
    assert "--profile needs --overhead" in capsys.readouterr().err
