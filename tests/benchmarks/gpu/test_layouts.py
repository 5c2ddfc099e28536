"""The part ``layouts``: which layouts it tries, how it reads what the tool found, and the whole of its dry form."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import checks
from benchmarks.gpu.part import FAILED, PASSED, SKIPPED, Done, Machine, Results, Skip, run_part
from tds.schedule.simulate import AUTO, SCHEDULES, by_default

SEEN = {"observed": 1e-15, "allowed": 1e-12}
TOLD = {
    "is_equal": True,
    "dtype": "fp64",
    "ranks": 2,
    "worst": "norm.weight",
    "seen": dict.fromkeys(("first_loss", "loss", "first_norm", "gradient"), SEEN),
}


def machine_in(folder: Path) -> Machine:
    return Machine("cpu", "CPU", True, 1, 2**34, 2, folder / "work", folder / "out")


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Let the tool be one that finds ``TOLD`` at once; return the command lines that it was started with."""
    lines: list[list[str]] = []

    def python(machine: Machine, *words: str) -> Done:
        lines.append(list(words))
        Path(words[words.index("--json") + 1]).write_text(json.dumps(TOLD), encoding="utf-8")
        return Done(0 if TOLD["is_equal"] else 1, "said", 0.1)

    monkeypatch.setattr(checks, "python", python)
    return lines


def results_in(folder: Path, only: str = "", budget_s: float = 480.0) -> dict[str, Any]:
    about = {"device": "CPU", "kind": "cpu", "is_dry": True, "date": "2026-11-24", "commit": "abc"}
    results = Results.begin_or_go_on(folder / "out", about)
    part = replace(checks.LAYOUTS_PART, budget_s=budget_s)
    run_part(part, machine_in(folder), results, only=only, say=lambda _: None)
    return dict(results.of("layouts"))


def test_every_schedule_every_stage_of_zero_and_every_axis_is_tried() -> None:
    told = " ".join(checks.LAYOUTS.values())
    for schedule in set(SCHEDULES) - {AUTO, "1f1b", "interleaved"}:
        assert f"--pipeline-schedule {schedule}" in told, schedule
    assert by_default(1) == "1f1b" and by_default(2) == "interleaved", "what is tried without a name"
    assert checks.LAYOUTS["gpt2 fp64 pp 2, 1f1b"] == checks.PIPE
    assert checks.LAYOUTS["gpt2 fp64 pp 2, interleaved"] == f"{checks.PIPE} --pipeline-chunks 2"
    assert all(f"--zero-stage {stage}" in told for stage in (1, 2, 3))
    assert "t5 fp64 tp 2 x pp 2" in checks.LAYOUTS


def test_one_process_is_started_once_for_a_model_and_a_format(tmp_path: Path, started: list[list[str]]) -> None:
    found = results_in(tmp_path)
    passed = [name for name, verdict in found.items() if verdict.status == PASSED]
    assert passed and set(passed) == {name for name in found if not name.startswith("nccl")}
    assert {verdict.status for name, verdict in found.items() if name.startswith("nccl")} == {SKIPPED}
    alone = [line for line in started if "--distributed-backend" not in line]
    assert len(alone) == 3 and len(started) == 3 + len(checks.LAYOUTS)
    assert len({line[line.index("--reference") + 1] for line in started}) == 3
    of_data = [line for line in started if "--data-parallel-size" in line]
    assert of_data and all(line[line.index("--gas") + 1] == "2" for line in of_data), "the same global batch"
    assert "worst gradient (norm.weight) 1.0e-15 (allowed 1e-12)" in found["gpt2 fp64 tp 2"].text


def test_a_layout_that_differs_fails(tmp_path: Path, started: list[list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TOLD, "is_equal", False)
    found = results_in(tmp_path, only="gpt2 fp64 tp 2 x pp 2")
    assert {verdict.status for verdict in found.values()} == {FAILED}
    assert "not equal to one process: losses 1.0e-15" in found["gpt2 fp64 tp 2 x pp 2"].text


def test_nccl_needs_a_gpu_and_all_of_several_are_used(tmp_path: Path, started: list[list[str]]) -> None:
    cases = {case.name: case.run for case in checks.layout_cases(machine_in(tmp_path))}
    cuda = Machine("cuda", "GPU", False, 1, 2**34, 2, tmp_path, tmp_path)
    with pytest.raises(Skip, match="there is one GPU"):
        cases["nccl, tp over all GPUs"](cuda, tmp_path)
    six = Machine("cuda", "GPU", False, 6, 2**34, 2, tmp_path, tmp_path)
    for axis, flag in checks.ALL_GPUS.items():
        cases[f"nccl, {axis} over all GPUs"](six, tmp_path)
        line = started.pop()
        assert line[line.index(flag) + 1] == "6" and line[line.index("--distributed-backend") + 1] == "nccl"
        assert line[line.index("--device") + 1] == "cuda"


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_the_dry_form_passes_over_gloo_on_the_cpu(tmp_path: Path) -> None:
    found = results_in(tmp_path, budget_s=1800.0)
    told = {name: (verdict.status, verdict.text) for name, verdict in found.items()}
    assert {status for name, (status, _) in told.items() if not name.startswith("nccl")} == {PASSED}, told
    assert found["gpt2 fp64 tp 2 x pp 2"].figures["ranks"] == 4
    assert found["gpt2 fp64 one process twice"].figures["gradient"] == 0.0, "a CPU repeats itself to the bit"
