"""``tools/draw_schedule.py`` draws plans and traces, tells their numbers, and refuses with code 2 what cannot be."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tds.action_times import Work
from tds.schedule import Costs, schedule_named, simulate
from tds.trace import TraceFile, events
from tools import draw_schedule

SCRIPT = Path(draw_schedule.__file__)
PNG = b"\x89PNG"
SIZE_FLAGS = "--stages 4 --micro-batches 8"


def run_tool(monkeypatch: pytest.MonkeyPatch, command_line: str) -> int:
    """Return the exit code of the tool with the flags of ``command_line``."""
    monkeypatch.setattr(sys, "argv", ["draw_schedule.py", *command_line.split()])
    try:
        return draw_schedule.main()
    except SystemExit as error:
        return int(error.code or 0)


def write_trace(folder: Path, schedule: str = "zb-h1", steps: int = 3, replicas: int = 1, num_missing: int = 0) -> None:
    """Write the trace of two stages as a run of four micro-batches would."""
    order = schedule_named(schedule)
    timeline = simulate([order(2, 4, stage) for stage in range(2)], Costs.even(2, 0.010, 0.012, 0.008))
    for replica in range(replicas):
        for stage in range(2 - num_missing):
            metadata = {
                "stage": stage,
                "num_stages": 2,
                "num_chunks": 1,
                "replica": replica,
                "tensor_rank": 0,
                "run": 1,
            }
            file = TraceFile(folder, 2 * replica + stage, metadata)
            for step in range(1, steps + 1):
                work = [
                    Work(s.action, *(round((t + step) * 1e9) for t in (s.start_s, s.end_s)))
                    for s in timeline.spans[stage]
                ]
                location = {"replica": replica, "stage": stage, "origin_ns": 0}
                file.add(events(work, step=step, schedule=schedule, num_micro_batches=4, **location))


def test_plan_is_drawn_and_summarized(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_tool(monkeypatch, "--schedule zb-h1 --stages 8 --micro-batches 16") == 0
    assert capsys.readouterr().out.splitlines() == [
        "zb-h1: 8 stages, 16 micro-batches",
        "bubble     12.7 %, at most 7 idle per stage",
        "step       55, in the unit of the costs",
        "in flight  at most 8 micro-batches on each stage",
        "picture    zb-h1-p8-m16.png",
    ]
    assert (tmp_path / "zb-h1-p8-m16.png").read_bytes().startswith(PNG)


def test_chunks_split_stage_costs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "i.png"
    line = f"--schedule interleaved {SIZE_FLAGS} --chunks 2 --costs 2,1,1 --transfer 0 --out {out}"
    assert run_tool(monkeypatch, line) == 0
    output = capsys.readouterr().out
    assert f"bubble     {100 * 3 / (2 * 8 + 3):.1f} %, at most 6 idle per stage" in output
    assert "step       38, in" in output and "4 stages of 2 chunks" in output
    assert "in flight  at most 11 9 7 5 chunks on the stages from 0" in output
    assert out.read_bytes().startswith(PNG)


def test_trace_is_drawn_with_its_simulation(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_trace(tmp_path, replicas=2)
    assert run_tool(monkeypatch, f"--trace {tmp_path}") == 0
    output = capsys.readouterr().out
    assert "zb-h1: step 3, 2 stages, 4 micro-batches" in output
    assert "bubble     10.4 % measured, 10.4 % predicted" in output
    assert "step       134 ms measured, 134 ms predicted" in output
    assert (tmp_path / "step-3.png").read_bytes().startswith(PNG)
    out = tmp_path / "own.png"
    assert run_tool(monkeypatch, f"--trace {tmp_path} --step 2 --replica 1 --out {out}") == 0
    assert "step 2," in capsys.readouterr().out and out.exists()


def test_schedule_is_written_to_csv_and_drawn_from_csv(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_tool(monkeypatch, "--schedule zb-v --stages 2 --micro-batches 4 --csv order.csv") == 0
    output_lines = capsys.readouterr().out.splitlines()
    assert output_lines[:2] == [
        "zb-v: 2 stages of 2 chunks, 4 micro-batches",
        "bubble     4.0 %, at most 0.5 idle per stage",
    ]
    assert run_tool(monkeypatch, "--schedule-file order.csv --out again.png") == 0
    redrawn_lines = capsys.readouterr().out.splitlines()
    assert redrawn_lines == ["order: 2 stages of 2 chunks, 4 micro-batches", *output_lines[1:4], "picture    again.png"]
    (tmp_path / "circle.csv").write_text("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n")
    assert run_tool(monkeypatch, "--schedule-file circle.csv") == 2
    assert "stages wait for each other: stage 0 at Backward" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("", "--schedule, --stages, --micro-batches missing"),
        (f"--schedule zb-v {SIZE_FLAGS} --chunks 3", "--schedule zb-v requires two chunks per stage, got --chunks 3"),
        (f"--schedule zb-v {SIZE_FLAGS} --group-size 4", "--group-size requires a schedule with interleaved chunks"),
        ("--schedule-file order.csv --stages 2", "--schedule-file and --stages cannot be combined"),
        ("--schedule-file order.csv", "No such file or directory"),
        ("--schedule 1f1b --stages 2", "--micro-batches missing"),
        (f"--schedule zb-h2 {SIZE_FLAGS}", "must be one of"),
        (f"--schedule interleaved {SIZE_FLAGS}", "requires several chunks per stage, got 1. Add --chunks 2"),
        (f"--schedule 1f1b {SIZE_FLAGS} --chunks 2", "requires one chunk per stage, got --chunks 2"),
        ("--schedule interleaved --stages 1 --micro-batches 2 --chunks 2", "num_stages >= 2 for more than one chunk"),
        ("--schedule 1f1b --stages 0 --micro-batches 2", "--stages: must be a whole number of at least 1, got '0'"),
        ("--schedule 1f1b --stages 2 --micro-batches two", "--micro-batches: must be a whole number"),
        (f"--schedule 1f1b {SIZE_FLAGS} --costs 1,2", "--costs: must be three times F,B,W"),
        (f"--schedule 1f1b {SIZE_FLAGS} --costs 1,nan,1", "--costs: must be a number of at least 0, got 'nan'"),
        (f"--schedule 1f1b {SIZE_FLAGS} --costs 0,0,0", "not all 0"),
        (f"--schedule 1f1b {SIZE_FLAGS} --transfer=-1", "--transfer: must be a number of at least 0"),
        (f"--schedule 1f1b {SIZE_FLAGS} --trace x", "--schedule (simulation) and --trace (trace) cannot be combined"),
        (f"--schedule 1f1b {SIZE_FLAGS} --step 2", "--schedule (simulation) and --step (trace) cannot be combined"),
        ("--step 2", "--step has no effect without --trace DIR"),
        (f"--schedule 1f1b {SIZE_FLAGS} --out plan.pdf", "--out must end in .png, got plan.pdf"),
        (f"--schedule 1f1b {SIZE_FLAGS} --out nowhere/plan.png", "No such file or directory"),
        ("--trace nowhere", "got none in nowhere"),
        ("--sched 1f1b", "unrecognized arguments"),
    ],
)
def test_invalid_arguments_exit_with_code_2(
    line: str, message: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_tool(monkeypatch, line) == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_incomplete_trace_exits_with_code_2(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_trace(tmp_path / "whole")
    write_trace(tmp_path / "half", num_missing=1)
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "trace-rank0.json").write_text('{"tds": {')
    for line, message in (
        ("--trace whole --step 9", "--step must be a complete step of the trace, one of [1, 2, 3], got 9"),
        ("--trace whole --replica 1", "in the trace whole, got 1"),
        ("--trace half", "for each of 2 stages, got stages [0]"),
        ("--trace broken", "is not a trace of tds, or it is truncated"),
    ):
        monkeypatch.chdir(tmp_path)
        assert run_tool(monkeypatch, line) == 2
        assert message in capsys.readouterr().err


HELP = """
import runpy, sys
sys.argv = ["draw_schedule.py", "--help"]
try:
    runpy.run_path(TOOL, run_name="__main__")
except SystemExit as error:
    assert error.code == 0
assert not {"torch", "deepspeed", "matplotlib"} & set(sys.modules)
"""


def test_help_imports_neither_torch_nor_deepspeed() -> None:
    code = HELP.replace("TOOL", repr(str(SCRIPT)))
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert "--micro-batches M" in result.stdout
