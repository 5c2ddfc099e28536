"""The plan for the first 15 minutes on a GPU: it fits, a step cannot take the time of others, results continue."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import __main__ as program
from benchmarks.gpu import first
from benchmarks.gpu.first import CALLS, Step
from benchmarks.gpu.part import NOT_RUN_CODE, ROOT, is_selected
from tests.benchmarks.gpu.made import make_dry_machine

MAX_FILES = 8
"""Files that a lent machine returns."""


@pytest.fixture
def options(tmp_path: Path) -> list[str]:
    return ["--out", str(tmp_path / "out"), "--state", str(tmp_path / "state")]


def run_plan(monkeypatch: pytest.MonkeyPatch, options: list[str], *steps: tuple[str, float, str]) -> int:
    """Run call A with steps that are programs in Python."""
    plan = tuple(Step(name, limit_s, "python") for name, limit_s, _ in steps)
    codes = {name: code for name, _, code in steps}
    monkeypatch.setitem(CALLS, "A", plan)
    monkeypatch.setattr(first, "command_of", lambda step, args: [sys.executable, "-c", codes[step.name]])
    return first.main(["A", *options])


def test_calls_fit_into_fifteen_minutes() -> None:
    for name, steps in CALLS.items():
        assert sum(step.limit_s for step in steps) <= first.CALL_LIMITS_S[name] - first.RESERVED_S, name
    assert first.CALL_LIMITS_S["A"] <= 520 and first.CALL_LIMITS_S["B"] <= 170
    names = [step.name for step in CALLS["A"]]
    assert names.index("canary") < names.index("speed of GPT-2 1.3B") < names.index("tests on the device")


def test_every_step_selects_cases(options: list[str], tmp_path: Path) -> None:
    """A misspelled name would select nothing, which only a GPU would show."""
    machine = make_dry_machine(tmp_path)
    for is_dry in (False, True):
        machine.is_dry, machine.device_type = is_dry, "cpu" if is_dry else "cuda"
        for call in ("A", "B"):
            for step in [step for step in CALLS[call] if step.program == "benchmark"]:
                args = first.parse_args([call, *options, *["--dry"] * is_dry])
                command = first.command_of(step, args)
                parsed = program.parse_args(command[3:])
                names = [case.name for part in parsed.parts for case in program.load_part(part).cases(machine)]
                assert all(any(text in name for name in names) for text in [*parsed.only, *parsed.skip]), step.name
                assert any(is_selected(name, only=parsed.only, skip=parsed.skip) for name in names), step.name
                assert 0 < parsed.minutes * 60 < step.limit_s * (first.DRY_FACTOR if is_dry else 1)
                assert parsed.limit_factor == (first.DRY_FACTOR if is_dry else 1)
                assert parsed.device == ("cpu" if is_dry else "cuda") and parsed.logs == args.state / "logs"
    assert set(first.LAYOUT_NAMES) <= {case.name for case in program.load_part("layouts").cases(machine)}


def test_tables_leave_time_for_the_cases_of_a_step(options: list[str]) -> None:
    for call in ("A", "B"):
        for step in [step for step in CALLS[call] if step.program == "benchmark"]:
            parsed = program.parse_args(first.command_of(step, first.parse_args([call, *options]))[3:])
            parts = [program.load_part(name) for name in parsed.parts]
            assert program.time_limit_s(parts, parsed.minutes * 60) > 0.6 * step.limit_s, step.name


def test_step_is_killed_at_its_limit_and_next_one_runs(
    monkeypatch: pytest.MonkeyPatch, options: list[str], tmp_path: Path
) -> None:
    sleeper = "import subprocess; print('begun', flush=True); subprocess.run(['sleep', '60'])"
    start = time.monotonic()
    steps = (("slow", 1.5, sleeper), ("fails", 20, "raise SystemExit(3)"), ("fine", 20, "print('fine')"))
    assert run_plan(monkeypatch, options, *steps) == 1 and time.monotonic() - start < 20
    log = (tmp_path / "out" / "first-a.log").read_text()
    assert "begun" in log and "\nfine\n" in log
    rows = {line.split()[0]: line.split(" s  ")[1] for line in log.splitlines()[-3:]}
    assert rows == {"slow": "killed at its limit", "fails": "failed, code 3", "fine": "passed"}


def test_step_with_cases_that_were_not_run_has_not_passed(
    monkeypatch: pytest.MonkeyPatch, options: list[str], tmp_path: Path
) -> None:
    assert run_plan(monkeypatch, options, ("late", 20, f"raise SystemExit({NOT_RUN_CODE})")) == 1
    assert "  not run: " in (tmp_path / "out" / "first-a.log").read_text().splitlines()[-1]


def test_last_step_gets_remaining_time_only(
    monkeypatch: pytest.MonkeyPatch, options: list[str], tmp_path: Path
) -> None:
    monkeypatch.setitem(first.CALL_LIMITS_S, "A", first.RESERVED_S + 1.6)
    assert run_plan(monkeypatch, options, ("a", 20, "import time; time.sleep(9)"), ("b", 20, "print('b')")) == 1
    log = (tmp_path / "out" / "first-a.log").read_text()
    assert log.splitlines()[-2].endswith("killed at its limit") and log.splitlines()[-1].endswith("no time left")


def test_results_continue_in_next_call(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The output folder is emptied before each call, and the machine's other folders are not."""
    state = ["--state", str(tmp_path / "state")]
    for call, out in (("a", tmp_path / "a"), ("b", tmp_path / "b")):
        code = (
            f"import json, pathlib; path = pathlib.Path({str(out / 'gpu-x.json')!r}); "
            "content = json.loads(path.read_text()) if path.exists() else {'runs': 0}; "
            "content['runs'] += 1; path.write_text(json.dumps(content))"
        )
        assert run_plan(monkeypatch, ["--out", str(out), *state], (call, 20, code)) == 0
    assert json.loads((tmp_path / "b" / "gpu-x.json").read_text()) == {"runs": 2}


def test_results_of_another_machine_are_continued(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    carried = tmp_path / first.REFERENCES_DIR
    carried.mkdir()
    (carried / "gpu-x.json").write_text("carried")
    monkeypatch.setattr(first, "ROOT", tmp_path)
    options = ["--out", str(tmp_path / "out"), "--state", str(tmp_path / "state")]
    assert run_plan(monkeypatch, options, ("a", 20, "print('a')")) == 0
    assert (tmp_path / "out" / "gpu-x.json").read_text() == "carried" == (tmp_path / "state" / "gpu-x.json").read_text()
    (tmp_path / "state" / "gpu-x.json").write_text("newer")
    assert run_plan(monkeypatch, options, ("a", 20, "print('a')")) == 0
    assert (tmp_path / "out" / "gpu-x.json").read_text() == "newer"


def test_log_is_limited_and_written_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first, "MAX_LOG_BYTES", 30)
    log = first.Log(tmp_path / "log")
    log.write("x" * 20)
    assert (tmp_path / "log").read_text() == "x" * 20 + "\n"
    log.write("y" * 20)
    assert (tmp_path / "log").read_text() == "x" * 20 + "\n"
    assert first.MAX_LOG_BYTES < 16 * 2**20


def test_missing_command_is_no_failure(monkeypatch: pytest.MonkeyPatch, options: list[str], tmp_path: Path) -> None:
    """A machine without nvidia-smi."""
    monkeypatch.setitem(CALLS, "A", (Step("machine", 5, "no-such-command"),))
    assert first.main(["A", *options]) == 0
    assert "not on this machine" in (tmp_path / "out" / "first-a.log").read_text()


def test_commit_is_carried_without_git(options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first, "carried_commit", lambda folder: "0123abc")
    args = first.parse_args(["A", *options])
    step = next(step for step in CALLS["A"] if step.program == "benchmark")
    monkeypatch.setattr(first, "ROOT", tmp_path)
    assert first.command_of(step, args)[-2:] == ["--commit", "0123abc"]
    (tmp_path / ".git").mkdir()
    assert "--commit" not in first.command_of(step, args)


def test_output_folder_is_read_from_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("OUT", str(tmp_path))
    assert first.parse_args(["A"]).out == tmp_path
    monkeypatch.delenv("OUT")
    assert first.parse_args(["A"]).out == Path("runs/gpu-first")
    assert first.parse_args(["A"]).state != first.parse_args(["A", "--dry"]).state


def test_script_lists_steps(tmp_path: Path) -> None:
    env: dict[str, Any] = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    result = subprocess.run(
        ["bash", str(ROOT / "benchmarks" / "gpu" / "first.sh"), "B", "--list"],
        cwd=tmp_path, env=env | {"PYTHON": sys.executable}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert [line.split(",")[0] for line in result.stdout.splitlines()] == [step.name for step in CALLS["B"]]
