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
from benchmarks.plan import CASES, EXPERT_CASES, Case, Measured, Row, config_of, row_of, rows_now, table
from megatron.planner.layout import layout_of


def estimate(total: int = 100, step_s: float = 1.0) -> Any:
    memory = [SimpleNamespace(total=total), SimpleNamespace(total=2 * total)]
    return SimpleNamespace(memory=memory, step_s=step_s, parts={"compute": step_s}, bubble=0.0)


def row(**others: Any) -> Row:
    given = {"estimated_s": 1.0, "measured_s": 1.0, "estimated_bytes": 100, "measured_bytes": 100, "stage": 0}
    return Row(**({"name": "x", "parts": {}, "bubble": 0.0} | given | others))


@pytest.mark.parametrize("is_smoke", [True, False])
def test_every_layout_is_a_command_line_and_has_its_ranks(is_smoke: bool) -> None:
    every = (*CASES, *EXPERT_CASES)
    assert len({case.name for case in every}) == len(every)
    for case in every:
        layout = layout_of(config_of(case, is_smoke=is_smoke), case.ranks)
        assert layout.world_size == case.ranks, case.name
    assert {case.family for case in CASES} == {"gpt2", "t5", "llama", "mpt", "bert"}


def timed(stage: int, steps_s: list[float], reference_s: list[float] | None = None) -> Measured:
    return Measured(stage, steps_s, reference_s or [], held_bytes=100)


def test_the_slowest_rank_and_the_median_step_count() -> None:
    ranks = [timed(0, [1.0, 9.0, 2.0]), timed(1, [3.0, 1.0, 1.0])]
    found = row_of(Case("gpt2", 2), estimate(step_s=1.5), ranks)
    assert found.measured_s == 3.0 and found.time_ratio == 0.5


def test_steps_are_scaled_to_the_speed_of_the_calibration() -> None:
    """The machine was half as fast as during calibration at the second step."""
    ranks = [timed(0, [1.0, 2.4, 1.1], [0.1, 0.2, 0.1])]
    assert row_of(Case("gpt2"), estimate(), ranks, calibrated_s=0.1).measured_s == pytest.approx(1.1)
    assert row_of(Case("gpt2"), estimate(), ranks, calibrated_s=0.2).measured_s == pytest.approx(2.2)
    assert row_of(Case("gpt2"), estimate(), ranks).measured_s == pytest.approx(1.1)


def test_the_rank_that_is_farthest_off_stands_for_the_memory() -> None:
    ranks = [Measured(0, held_bytes=60, added_bytes=45), Measured(1, held_bytes=100, added_bytes=60)]
    found = row_of(Case("gpt2", 2), estimate(), ranks)
    assert (found.stage, found.estimated_bytes, found.measured_bytes) == (1, 200, 160)
    assert found.measured_s is None and found.time_ratio is None


@pytest.mark.parametrize(
    ("others", "time", "memory"),
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
def test_a_row_is_met_within_both_bars(others: dict[str, Any], time: bool | None, memory: bool) -> None:
    found = row(**others)
    assert (found.is_time_met, found.is_memory_met) == (time, memory)
    assert found.is_met == (time is not False and memory)


def test_the_table_says_what_is_far_and_what_is_worst() -> None:
    text = table([row(), row(name="slow", estimated_s=0.5), row(name="large", estimated_bytes=150)])
    assert "step time: 2 of 3 layouts within 15% of measurement: NOT met; worst ratio 0.500" in text
    assert "memory: 2 of 3 layouts within 10% of measurement: NOT met; worst ratio 1.500" in text
    assert text.count("FAR") == 2
    untimed = table([row(measured_s=None)])
    assert "step time" not in untimed and "memory: 1 of 1 layouts within 10% of measurement: met" in untimed


def test_layouts_are_chosen_by_their_names(capsys: pytest.CaptureFixture[str]) -> None:
    plan.main(["--list", "--only", "t5 1 rank"])
    assert capsys.readouterr().out.splitlines() == ["t5 1 rank", "t5 1 rank checkpoint-activations"]
    assert plan.chosen(plan.parse_args([])) == list(CASES)
    assert plan.chosen(plan.parse_args(["--memory-only", "--only", "num-experts"])) == list(EXPERT_CASES)
    with pytest.raises(SystemExit, match="--only must name a layout, got"):
        plan.main(["--only", "nothing"])


def test_the_number_of_steps_must_be_positive(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        plan.parse_args(["--steps", "0"])
    assert "--steps must be at least 1, got 0" in capsys.readouterr().err


@pytest.fixture
def no_training(monkeypatch: pytest.MonkeyPatch) -> list[dict[int, str | None]]:
    """Take the place of trainings and calibration; return the names of the machines that were asked for."""
    asked: list[dict[int, str | None]] = []

    def compare(case: Case, machine: Any, args: argparse.Namespace) -> Row:
        asked.append({case.ranks: machine and machine.name})
        return row(name=case.name, measured_s=None if machine is None else 1.3)

    monkeypatch.setattr(plan, "compare", compare)
    machines = {ranks: replace(plan.UNTIMED, name=f"of {ranks}") for ranks in (1, 2)}
    monkeypatch.setattr(plan, "machine_of", lambda ranks, args: machines[ranks])
    return asked


def test_each_number_of_ranks_has_its_own_machine_and_a_missed_bar_ends_a_strict_run(
    no_training: list[dict[int, str | None]], tmp_path: Path
) -> None:
    with pytest.raises(SystemExit, match="outside a bar: mpt 1 rank, bert 1 rank$"):
        plan.main(["--strict", "--out", str(tmp_path), "--only", "mpt", "bert"])
    plan.main(["--out", str(tmp_path), "--only", "t5 2 ranks"])
    assert {(ranks, machine) for each in no_training for ranks, machine in each.items()} == {(1, "of 1"), (2, "of 2")}
    found = json.loads((tmp_path / "plan.json").read_text())
    assert (
        len(found["rows"]) == 3
        and found["rows"][0]["time_ratio"] == pytest.approx(1 / 1.3)
        and not found["rows"][0]["is_time_met"]
    )
    assert "NOT met" in (tmp_path / "table.txt").read_text()


def test_memory_alone_calibrates_nothing(no_training: list[dict[int, str | None]], tmp_path: Path) -> None:
    plan.main(["--strict", "--memory-only", "--out", str(tmp_path), "--only", "mpt"])
    assert no_training == [{1: None}]


@pytest.mark.slow
def test_the_benchmark_runs(tmp_path: Path) -> None:
    result = plan.main(["--smoke", "--steps", "2", "--only", "mpt", "--out", str(tmp_path)])
    (told,) = result["rows"]
    (again,) = rows_now(json.loads((tmp_path / "plan.json").read_text()))
    assert again.as_data() == told
    assert told["measured_s"] > 0 and told["estimated_s"] > 0 and (tmp_path / "machine-1.json").exists()
    assert plan.MEMORY_BAR == 0.10 and plan.TIME_BAR == 0.15
