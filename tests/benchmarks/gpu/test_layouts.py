"""The part ``layouts``: which layouts it tries, how it reads what the tool found, and the whole of its dry form."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import checks
from benchmarks.gpu.part import FAILED, PASSED, SKIPPED, CompletedCommand, Machine, Results, Skip, run_part
from tds.schedule.simulate import AUTO, SCHEDULES, default_schedule

COMPARISON = {"observed": 1e-15, "allowed": 1e-12}
TOOL_REPORT = {
    "is_equal": True,
    "dtype": "fp64",
    "ranks": 2,
    "worst": "norm.weight",
    "seen": dict.fromkeys(("first_loss", "loss", "first_norm", "gradient"), COMPARISON),
}


def make_machine(folder: Path) -> Machine:
    return Machine("cpu", "CPU", True, 1, 2**34, 2, folder / "work", folder / "out")


@pytest.fixture
def fake_tool(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Let the tool be one that finds ``TOOL_REPORT`` at once; return the command lines that it was started with."""
    lines: list[list[str]] = []

    def python(machine: Machine, *args: str) -> CompletedCommand:
        lines.append(list(args))
        Path(args[args.index("--json") + 1]).write_text(json.dumps(TOOL_REPORT), encoding="utf-8")
        return CompletedCommand(0 if TOOL_REPORT["is_equal"] else 1, "said", 0.1)

    monkeypatch.setattr(checks, "run_python", python)
    return lines


def run_layouts(folder: Path, only: str = "", budget_s: float = 480.0) -> dict[str, Any]:
    metadata = {"device": "CPU", "kind": "cpu", "is_dry": True, "date": "2026-11-24", "commit": "abc"}
    results = Results.continue_or_start(folder / "out", metadata)
    part = replace(checks.LAYOUTS_PART, budget_s=budget_s)
    run_part(part, make_machine(folder), results, only=[only] if only else [], print_line=lambda _: None)
    return dict(results.of("layouts"))


def test_layouts_cover_schedules_zero_stages_and_axes() -> None:
    layout_flags = " ".join(checks.LAYOUTS.values())
    for schedule in set(SCHEDULES) - {AUTO, "1f1b", "interleaved"}:
        assert f"--pipeline-schedule {schedule}" in layout_flags, schedule
    assert default_schedule(1) == "1f1b" and default_schedule(2) == "interleaved", "what is tried without a name"
    assert checks.LAYOUTS["gpt2 fp64 pp 2, 1f1b"] == checks.PIPE
    assert checks.LAYOUTS["gpt2 fp64 pp 2, interleaved"] == f"{checks.PIPE} --pipeline-chunks 2"
    assert all(f"--zero-stage {stage}" in layout_flags for stage in (1, 2, 3))
    assert "t5 fp64 tp 2 x pp 2" in checks.LAYOUTS


def test_reference_runs_once_per_model_and_dtype(tmp_path: Path, fake_tool: list[list[str]]) -> None:
    verdicts = run_layouts(tmp_path)
    passed = [name for name, verdict in verdicts.items() if verdict.status == PASSED]
    assert passed and set(passed) == {name for name in verdicts if not name.startswith("nccl")}
    assert {verdict.status for name, verdict in verdicts.items() if name.startswith("nccl")} == {SKIPPED}
    reference_lines = [line for line in fake_tool if "--distributed-backend" not in line]
    assert len(reference_lines) == 4 and len(fake_tool) == 4 + len(checks.LAYOUTS)
    assert len({line[line.index("--reference") + 1] for line in fake_tool}) == 4
    data_parallel_lines = [line for line in fake_tool if "--data-parallel-size" in line]
    assert {
        int(line[line.index("--gas") + 1]) * int(line[line.index("--data-parallel-size") + 1])
        for line in data_parallel_lines
    } == {checks.MICRO_BATCHES}, "the same global batch"
    assert "worst gradient (norm.weight) 1.0e-15 (allowed 1e-12)" in verdicts["gpt2 fp64 tp 2"].text


def test_unequal_layout_fails(tmp_path: Path, fake_tool: list[list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TOOL_REPORT, "is_equal", False)
    verdicts = run_layouts(tmp_path, only="gpt2 fp64 tp 2 x pp 2")
    assert {verdict.status for verdict in verdicts.values()} == {FAILED}
    assert "not equal to one process: losses 1.0e-15" in verdicts["gpt2 fp64 tp 2 x pp 2"].text


def test_nccl_cases_use_all_gpus(tmp_path: Path, fake_tool: list[list[str]]) -> None:
    cases = {case.name: case.run for case in checks.layout_cases(make_machine(tmp_path))}
    one_gpu = Machine("cuda", "GPU", False, 1, 2**34, 2, tmp_path, tmp_path)
    with pytest.raises(Skip, match="there is one GPU"):
        cases["nccl, tp over all GPUs"](one_gpu, tmp_path)
    six_gpus = Machine("cuda", "GPU", False, 6, 2**34, 2, tmp_path, tmp_path)
    for axis, flag in checks.ALL_GPUS.items():
        cases[f"nccl, {axis} over all GPUs"](six_gpus, tmp_path)
        line = fake_tool.pop()
        assert line[line.index(flag) + 1] == "6" and line[line.index("--distributed-backend") + 1] == "nccl"
        assert line[line.index("--device") + 1] == "cuda"


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_dry_run_passes_with_gloo(tmp_path: Path) -> None:
    verdicts = run_layouts(tmp_path, budget_s=1800.0)
    outcomes = {name: (verdict.status, verdict.text) for name, verdict in verdicts.items()}
    assert {status for name, (status, _) in outcomes.items() if not name.startswith("nccl")} == {PASSED}, outcomes
    assert verdicts["gpt2 fp64 tp 2 x pp 2"].figures["ranks"] == 4
    assert verdicts["gpt2 fp64 one process twice"].figures["gradient"] == 0.0, "a CPU repeats itself to the bit"
