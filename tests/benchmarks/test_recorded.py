"""The planner's step times lie within 15 % of what an idle machine measured, its bytes within 10 %, in every layout.

``recorded/two_cores.json`` holds what trainings of 22 layouts took on two idle cores, and the machine as it was
calibrated with them. Estimates are made anew in each test, so a change of the planner is held against the measurements.
After a change of what a step does, record them again on an idle machine (about 8 minutes), look at the table, and copy:

    python benchmarks/plan.py --strict --out runs/plan
    cp runs/plan/plan.json tests/benchmarks/recorded/two_cores.json
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.plan import CASES, MEMORY_BAR, TIME_BAR, Row, recompute_rows

RECORDING_FILE = Path(__file__).parent / "recorded" / "two_cores.json"


@pytest.fixture(scope="module")
def recording() -> dict[str, Any]:
    if not RECORDING_FILE.is_file():
        pytest.fail(
            f"{RECORDING_FILE} is not there; record it on an idle machine as the top of {Path(__file__).name} says"
        )
    return json.loads(RECORDING_FILE.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def rows(recording: dict[str, Any]) -> list[Row]:
    return list(recompute_rows(recording))


def test_recording_has_every_layout_at_full_size(recording: dict[str, Any], rows: list[Row]) -> None:
    assert not recording["is_smoke"]
    assert {row.name for row in rows} == {case.name for case in CASES}
    assert set(recording["machines"]) == {str(case.num_ranks) for case in CASES}
    assert all(row.measured_s for row in rows)


def test_step_times_match_recording(rows: list[Row]) -> None:
    beyond_limit = {row.name: round(row.time_ratio or 0.0, 3) for row in rows if not row.is_time_met}
    assert not beyond_limit, f"estimate / measured beyond {TIME_BAR:.0%}: {beyond_limit}"


def test_memory_matches_recording(rows: list[Row]) -> None:
    beyond_limit = {row.name: round(row.memory_ratio, 3) for row in rows if not row.is_memory_met}
    assert not beyond_limit, f"estimate / counted beyond {MEMORY_BAR:.0%}: {beyond_limit}"
