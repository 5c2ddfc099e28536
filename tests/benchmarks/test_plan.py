"""The benchmark of the planner: its layouts are those of real command lines, its ratios and verdicts are right."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import plan
from benchmarks.plan import (
    CASES,
    EXPERT_CASES,
    Case,
    RankMeasurement,
    Row,
    make_config,
    make_row,
    recompute_rows,
    table,
)
from megatron.planner.layout import layout_of


def make_estimate(total: int = 100, step_s: float = 1.0) -> Any:
    memory = [SimpleNamespace(total=total), SimpleNamespace(total=2 * total)]
    return SimpleNamespace(memory=memory, step_s=step_s, seconds_by_activity={"compute": step_s}, bubble=0.0)


def build_row(**overrides: Any) -> Row:
    values = {"estimated_s": 1.0, "measured_s": 1.0, "estimated_bytes": 100, "measured_bytes": 100, "stage": 0}
    return Row(**({"name": "x", "parts": {}, "bubble": 0.0} | values | overrides))


@pytest.mark.parametrize("is_smoke", [True, False])
def test_every_case_parses_and_uses_its_ranks(is_smoke: bool) -> None:
    cases = (*CASES, *EXPERT_CASES)
    assert len({case.name for case in cases}) == len(cases)
    for case in cases:
        layout = layout_of(make_config(case, is_smoke=is_smoke), case.num_ranks)
        assert layout.world_size == case.num_ranks, case.name
    assert {case.family for case in CASES} == {"gpt2", "t5", "llama", "mpt", "bert"}


def make_measured(stage: int, steps_s: list[float], reference_s: list[float] | None = None) -> RankMeasurement:
    return RankMeasurement(stage, steps_s, reference_s or [], live_bytes=100)


def test_row_uses_slowest_rank_and_median_step() -> None:
    ranks = [make_measured(0, [1.0, 9.0, 2.0]), make_measured(1, [3.0, 1.0, 1.0])]
    result = make_row(Case("gpt2", 2), make_estimate(step_s=1.5), ranks)
    assert result.measured_s == 3.0 and result.time_ratio == 0.5


def test_steps_are_scaled_to_calibration_speed() -> None:
    """The machine was half as fast as during calibration at the second step."""
    ranks = [make_measured(0, [1.0, 2.4, 1.1], [0.1, 0.2, 0.1])]
    assert make_row(Case("gpt2"), make_estimate(), ranks, calibrated_s=0.1).measured_s == pytest.approx(1.1)
    assert make_row(Case("gpt2"), make_estimate(), ranks, calibrated_s=0.2).measured_s == pytest.approx(2.2)
    assert make_row(Case("gpt2"), make_estimate(), ranks).measured_s == pytest.approx(1.1)


def test_memory_uses_rank_with_largest_error() -> None:
    ranks = [RankMeasurement(0, live_bytes=60, added_bytes=45), RankMeasurement(1, live_bytes=100, added_bytes=60)]
    result = make_row(Case("gpt2", 2), make_estimate(), ranks)
    assert (result.stage, result.estimated_bytes, result.measured_bytes) == (1, 200, 160)
    assert result.measured_s is None and result.time_ratio is None


@pytest.mark.parametrize(
    ("overrides", "is_time_met", "is_memory_met"),
    [
        ({}, True, True),
        ({"estimated_s": 1.14}, True, True),
        ({"estimated_s": 1.16}, False, True),
        ({"estimated_s": 0.84}, False, True),
        ({"estimated_bytes": 89}, True, False),
        ({"estimated_bytes": 111}, True, False),
        ({"measured_s": None, "estimated_bytes": 109}, None, True),
    ],
    ids=str,
)
def test_row_is_met_within_both_limits(
    overrides: dict[str, Any], is_time_met: bool | None, is_memory_met: bool
) -> None:
    result = build_row(**overrides)
    assert (result.is_time_met, result.is_memory_met) == (is_time_met, is_memory_met)
    assert result.is_met == (is_time_met is not False and is_memory_met)


def test_table_marks_failures_and_worst_ratio() -> None:
    text = table([build_row(), build_row(name="slow", estimated_s=0.5), build_row(name="large", estimated_bytes=150)])
    assert "step time: 2 of 3 layouts within 15% of measurement: NOT met; worst ratio 0.500" in text
    assert "memory: 2 of 3 layouts within 10% of measurement: NOT met; worst ratio 1.500" in text
    assert text.count("FAR") == 2
    untimed = table([build_row(measured_s=None)])
    assert "step time" not in untimed and "memory: 1 of 1 layouts within 10% of measurement: met" in untimed


def test_only_selects_cases_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    plan.main(["--list", "--only", "t5 1 rank"])
    assert capsys.readouterr().out.splitlines() == ["t5 1 rank", "t5 1 rank checkpoint-activations"]
    assert plan.select_cases(plan.parse_args([])) == list(CASES)
    assert plan.select_cases(plan.parse_args(["--memory-only", "--only", "num-experts"])) == list(EXPERT_CASES)
    with pytest.raises(SystemExit, match="--only must name a layout, got"):
        plan.main(["--only", "nothing"])


def test_steps_flag_rejects_zero(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        plan.parse_args(["--steps", "0"])
    assert "--steps must be at least 1, got 0" in capsys.readouterr().err


@pytest.fixture
def fake_training(monkeypatch: pytest.MonkeyPatch) -> list[dict[int, str | None]]:
    """Take the place of trainings and calibration; return the names of the machines that were asked for."""
    requests: list[dict[int, str | None]] = []

    def compare(case: Case, machine: Any, args: argparse.Namespace) -> Row:
        requests.append({case.num_ranks: machine and machine.name})
        return build_row(name=case.name, measured_s=None if machine is None else 1.3)

    monkeypatch.setattr(plan, "compare", compare)
    machines = {ranks: replace(plan.PLACEHOLDER_MACHINE, name=f"of {ranks}") for ranks in (1, 2)}
    monkeypatch.setattr(plan, "calibrate_machine", lambda ranks, args: machines[ranks])
    return requests


def test_strict_fails_on_missed_limit_and_calibrates_per_ranks(
    fake_training: list[dict[int, str | None]], tmp_path: Path
) -> None:
    with pytest.raises(SystemExit, match="outside a bar: mpt 1 rank, bert 1 rank$"):
        plan.main(["--strict", "--out", str(tmp_path), "--only", "mpt", "bert"])
    plan.main(["--out", str(tmp_path), "--only", "t5 2 ranks"])
    assert {(ranks, machine) for request in fake_training for ranks, machine in request.items()} == {
        (1, "of 1"),
        (2, "of 2"),
    }
    report = json.loads((tmp_path / "plan.json").read_text())
    assert (
        len(report["rows"]) == 3
        and report["rows"][0]["time_ratio"] == pytest.approx(1 / 1.3)
        and not report["rows"][0]["is_time_met"]
    )
    assert "NOT met" in (tmp_path / "table.txt").read_text()


def test_memory_only_skips_calibration(fake_training: list[dict[int, str | None]], tmp_path: Path) -> None:
    plan.main(["--strict", "--memory-only", "--out", str(tmp_path), "--only", "mpt"])
    assert fake_training == [{1: None}]


@pytest.mark.slow
def test_benchmark_runs(tmp_path: Path) -> None:
    result = plan.main(["--smoke", "--steps", "2", "--only", "mpt", "--out", str(tmp_path)])
    (row_data,) = result["rows"]
    (reread_row,) = recompute_rows(json.loads((tmp_path / "plan.json").read_text()))
    assert reread_row.as_data() == row_data
    assert row_data["measured_s"] > 0 and row_data["estimated_s"] > 0 and (tmp_path / "machine-1.json").exists()
    assert plan.MEMORY_BAR == 0.10 and plan.TIME_BAR == 0.15
