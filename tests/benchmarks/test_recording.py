"""Estimates that are made again from what ``benchmarks/plan.py`` wrote are those that it made."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import plan
from benchmarks.plan import PLACEHOLDER_MACHINE, Case, RankMeasurement, make_config, recompute_rows, to_recording
from megatron.planner.machine import Machine

NOTES = "Measured on a host of that name"


@pytest.fixture
def fake_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take the place of calibration and trainings: a known machine; steps of 2 s, 100 MB on each rank."""

    def calibrate(ranks: int, *args: Any, **kwargs: Any) -> Machine:
        return replace(PLACEHOLDER_MACHINE, name=f"{ranks} at once", overhead_s=ranks * 1e-5, notes=NOTES)

    def run_ranks(ranks: int, *args: Any, **kwargs: Any) -> list[RankMeasurement]:
        stages = make_config(args[1], is_smoke=args[2]).parallel.num_stages
        steps = {"steps_s": [2.0] * 3}
        bytes_ = {"live_bytes": 60_000_000, "added_bytes": 40_000_000}
        return [RankMeasurement(rank * stages // ranks, **steps, **bytes_) for rank in range(ranks)]

    monkeypatch.setattr(plan, "calibrate", calibrate)
    monkeypatch.setattr(plan, "run_ranks", run_ranks)


def test_recording_reproduces_its_estimates(fake_training: None, tmp_path: Path) -> None:
    plan.main(["--smoke", "--only", "gpt2 2 ranks", "mpt", "--out", str(tmp_path)])
    text = (tmp_path / "plan.json").read_text()
    recording = json.loads(text)
    assert set(recording["machines"]) == {"1", "2"} and NOTES not in text
    rows = list(recompute_rows(recording))
    assert [row.as_data() for row in rows] == recording["rows"] and len(rows) == 9
    assert {row.measured_s for row in rows} == {2.0} and {row.stage for row in rows} == {0, 1}


def test_estimates_depend_on_machine_and_sizes() -> None:
    """Were they taken from the recording, a change of the planner would pass unseen."""
    fast_machine = replace(
        PLACEHOLDER_MACHINE, product_flops=dict.fromkeys(PLACEHOLDER_MACHINE.product_flops, ((64.0, 1e13),))
    )
    case = Case("mpt")
    row_data = {"name": case.name, "measured_s": 1.0, "measured_bytes": 1, "stage": 0}
    estimates = [
        next(recompute_rows({**to_recording([], {1: machine}, is_smoke=is_smoke), "rows": [row_data]}))
        for machine, is_smoke in ((PLACEHOLDER_MACHINE, True), (fast_machine, True), (PLACEHOLDER_MACHINE, False))
    ]
    small, fast_estimate, large = estimates
    assert fast_estimate.estimated_s < small.estimated_s < large.estimated_s
    assert fast_estimate.estimated_bytes == small.estimated_bytes < large.estimated_bytes
