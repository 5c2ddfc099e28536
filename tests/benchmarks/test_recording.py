"""Estimates that are made again from what ``benchmarks/plan.py`` wrote are those that it made."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import plan
from benchmarks.plan import UNTIMED, Case, Measured, config_of, recorded, rows_now
from megatron.planner.machine import Machine

NOTES = "Measured on a host of that name"


@pytest.fixture
def no_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take the place of calibration and trainings: a known machine; steps of 2 s, 100 MB on each rank."""

    def calibrate(ranks: int, *words: Any, **named: Any) -> Machine:
        return replace(UNTIMED, name=f"{ranks} at once", overhead_s=ranks * 1e-5, notes=NOTES)

    def run_ranks(ranks: int, *words: Any, **named: Any) -> list[Measured]:
        stages = config_of(words[1], is_smoke=words[2]).parallel.num_stages
        steps = {"steps_s": [2.0] * 3}
        bytes_ = {"held_bytes": 60_000_000, "added_bytes": 40_000_000}
        return [Measured(rank * stages // ranks, **steps, **bytes_) for rank in range(ranks)]

    monkeypatch.setattr(plan, "calibrate", calibrate)
    monkeypatch.setattr(plan, "run_ranks", run_ranks)


def test_a_recording_gives_the_estimates_that_it_was_made_with(no_training: None, tmp_path: Path) -> None:
    plan.main(["--smoke", "--only", "gpt2 2 ranks", "mpt", "--out", str(tmp_path)])
    text = (tmp_path / "plan.json").read_text()
    recording = json.loads(text)
    assert set(recording["machines"]) == {"1", "2"} and NOTES not in text
    rows = list(rows_now(recording))
    assert [row.as_data() for row in rows] == recording["rows"] and len(rows) == 9
    assert {row.measured_s for row in rows} == {2.0} and {row.stage for row in rows} == {0, 1}


def test_a_faster_machine_and_larger_sizes_give_other_estimates() -> None:
    """Were they taken from the recording, a change of the planner would pass unseen."""
    fast = replace(UNTIMED, product_flops=dict.fromkeys(UNTIMED.product_flops, ((64.0, 1e13),)))
    case = Case("mpt")
    told = {"name": case.name, "measured_s": 1.0, "measured_bytes": 1, "stage": 0}
    found = [
        next(rows_now({**recorded([], {1: machine}, is_smoke=is_smoke), "rows": [told]}))
        for machine, is_smoke in ((UNTIMED, True), (fast, True), (UNTIMED, False))
    ]
    small, fast_one, large = found
    assert fast_one.estimated_s < small.estimated_s < large.estimated_s
    assert fast_one.estimated_bytes == small.estimated_bytes < large.estimated_bytes
