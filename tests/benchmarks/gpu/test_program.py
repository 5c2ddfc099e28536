"""The program around the parts: verdicts, what is repeated, what is ended in time, how the shell script starts it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import __main__ as program
from benchmarks.gpu import part
from benchmarks.gpu.part import (
    FAILED,
    FINAL,
    NOT_RUN,
    NOT_RUN_CODE,
    PASSED,
    SKIPPED,
    Case,
    Machine,
    Part,
    Results,
    Skip,
    Verdict,
    run_part,
)

ROOT = Path(__file__).resolve().parents[3]
METADATA = {"device": "NVIDIA H200", "kind": "cuda", "is_dry": False, "date": "2026-11-24", "commit": "abc"}


def make_machine(folder: Path, **overrides: Any) -> Machine:
    """Return a CPU in the device's place."""
    return Machine("cpu", "CPU", True, 1, 2**34, 2, folder / "work", folder / "out", **overrides)


def passing_case(machine: Machine, folder: Path) -> tuple[str, dict[str, Any]]:
    return "seen", {"number": 3}


def failing_case(machine: Machine, folder: Path) -> tuple[str, dict[str, Any]]:
    raise AssertionError("the loss must be 1,\n  got 2")


def raising_case(machine: Machine, folder: Path) -> tuple[str, dict[str, Any]]:
    raise KeyError("weights")


def skipped_case(machine: Machine, folder: Path) -> tuple[str, dict[str, Any]]:
    raise Skip("needs two GPUs, there is one")


def make_part(*cases: Case, **options: Any) -> Part:
    return Part("train", "a part", lambda machine: cases, **options)


def wait_until_gone(pid: int) -> bool:
    """Whether a process ends within some seconds."""
    for _ in range(200):
        try:
            if " Z " in Path(f"/proc/{pid}/stat").read_text():
                return True
        except FileNotFoundError:
            return True
        time.sleep(0.05)
    return False


def run_cases(
    folder: Path, *cases: Case, lines: list[str] | None = None, results: Results | None = None, **options: Any
) -> Results:
    """Run the cases in ``folder`` and return their results."""
    results = results or Results.continue_or_start(folder / "out", METADATA)
    output_lines: list[str] = [] if lines is None else lines
    statuses_to_repeat = options.pop("again", ())
    run_part(
        make_part(*cases, **options),
        make_machine(folder),
        results,
        repeated_statuses=statuses_to_repeat,
        print_line=output_lines.append,
    )
    return results


def test_failed_case_prints_one_line_and_others_run(tmp_path: Path) -> None:
    lines: list[str] = []
    run_cases(
        tmp_path,
        Case("a", failing_case),
        Case("b", raising_case),
        Case("c", skipped_case),
        Case("d", passing_case),
        lines=lines,
    )
    assert [line.split(" (")[0] for line in lines[1:]] == [
        "failed   train: a", "failed   train: b", "skipped  train: c", "passed   train: d",
    ]  # fmt: skip
    assert lines[1].endswith("the loss must be 1, | got 2") and "KeyError: 'weights'" in lines[2]
    (file,) = (tmp_path / "out").iterdir()
    assert file.name == "gpu-nvidia-h200-2026-11-24.json"
    content = json.loads(file.read_text())
    assert content["commit"] == "abc" and content["parts"]["train"]["cases"]["d"]["figures"] == {"number": 3}
    assert {name: verdict["status"] for name, verdict in content["parts"]["train"]["cases"].items()} == {
        "a": FAILED, "b": FAILED, "c": SKIPPED, "d": PASSED,
    }  # fmt: skip


def test_second_start_runs_only_missing_cases(tmp_path: Path) -> None:
    calls: list[str] = []

    def make_counted_case(name: str) -> Case:
        return Case(name, lambda machine, folder: (calls.append(name) or "seen", {}))

    run_cases(tmp_path, make_counted_case("first"), budget_s=60.0)
    results = run_cases(tmp_path, make_counted_case("first"), make_counted_case("second"), budget_s=0.0)
    assert results.of("train")["second"].status == NOT_RUN and calls == ["first"]
    run_cases(tmp_path, make_counted_case("first"), make_counted_case("second"))
    assert calls == ["first", "second"] and len(list((tmp_path / "out").iterdir())) == 1
    run_cases(tmp_path, make_counted_case("first"), make_counted_case("second"), again=FINAL)
    assert calls == ["first", "second"] * 2


def test_failed_flag_repeats_only_failed_cases(tmp_path: Path) -> None:
    run_cases(tmp_path, Case("good", passing_case), Case("bad", failing_case), Case("lacking", skipped_case))
    statuses_to_repeat = program.parse_args(["--failed"]).again
    results = run_cases(
        tmp_path, *(Case(name, passing_case) for name in ("good", "bad", "lacking")), again=statuses_to_repeat
    )
    assert [verdict.status for verdict in results.of("train").values()] == [PASSED, PASSED, SKIPPED]
    assert set(program.parse_args(["--again"]).again) == set(FINAL) and not program.parse_args([]).again


@pytest.mark.slow
def test_case_stopped_by_part_budget_is_not_failed(tmp_path: Path) -> None:
    """Nor does one begin that would be cut off at once; one that takes longer than its own limit has failed."""

    def slow_case(machine: Machine, folder: Path) -> tuple[str, dict[str, Any]]:
        part.run_python(machine, "-c", "import time; time.sleep(60)").check()
        return "", {}

    slow, short = Case("slow", slow_case), Case("short", slow_case, limit_s=1.0)
    verdicts = run_cases(tmp_path, slow, budget_s=1.5).of("train")
    assert verdicts["slow"].status == NOT_RUN and verdicts["slow"].seconds < 20
    assert (
        "killed at the end of the part's 2 s" in verdicts["slow"].text
        and "did not end in time" in verdicts["slow"].text
    )
    late = run_cases(
        tmp_path, Case("first", lambda *_: (time.sleep(1.4), ("", {}))[1]), Case("late", passing_case), budget_s=1.5
    )
    assert [late.of("train")[name].status for name in ("first", "late")] == [PASSED, NOT_RUN]
    assert run_cases(tmp_path, short, budget_s=60.0).of("train")["short"].status == FAILED


def test_limit_factor_extends_deadline_of_cases(tmp_path: Path) -> None:
    deadlines: list[float] = []

    def note_deadline(machine: Machine, folder: Path) -> tuple[str, dict[str, Any]]:
        deadlines.append(machine.deadline - time.monotonic())
        return "", {}

    machine = make_machine(tmp_path)
    for limit_factor in (1.0, 30.0):
        machine.limit_factor = limit_factor
        results = Results(tmp_path / f"{limit_factor}.json", {})
        run_part(make_part(Case("case", note_deadline, limit_s=10.0)), machine, results, print_line=lambda _: None)
    assert 9 < deadlines[0] <= 10 and 290 < deadlines[1] <= 300


def test_results_of_other_commit_or_device_are_preserved(tmp_path: Path) -> None:
    first = Results.continue_or_start(tmp_path, METADATA)
    first.add("train", "a", Verdict(PASSED, "seen"))
    assert Results.continue_or_start(tmp_path, METADATA | {"date": "2026-11-25"}).path == first.path
    later = Results.continue_or_start(tmp_path, METADATA | {"commit": "def"})
    assert later.of("train") == {} and later.path.name == "gpu-nvidia-h200-2026-11-24-2.json"
    assert (
        Results.continue_or_start(tmp_path, METADATA | {"device": "NVIDIA L4"}).path.name
        == "gpu-nvidia-l4-2026-11-24.json"
    )


def test_cases_run_concurrently_except_exclusive_ones(tmp_path: Path) -> None:
    running: list[int] = []
    max_running: dict[str, int] = {}

    def record_concurrency(name: str) -> Any:
        def run_case(machine: Machine, folder: Path) -> tuple[str, dict[str, Any]]:
            running.append(1)
            time.sleep(0.1)
            max_running[name] = max(max_running.get(name, 0), len(running))
            time.sleep(0.1)
            running.pop()
            return "", {}

        return run_case

    cases = [
        Case("a", record_concurrency("a")),
        Case("b", record_concurrency("b")),
        Case("alone", record_concurrency("alone"), is_exclusive=True),
        Case("c", record_concurrency("c")),
    ]
    run_cases(tmp_path, *cases, num_concurrent=4)
    assert max_running["alone"] == 1 and max(max_running["a"], max_running["b"], max_running["c"]) > 1


def test_shared_value_is_computed_once(tmp_path: Path) -> None:
    calls: list[int] = []

    def use_shared(machine: Machine, folder: Path) -> tuple[str, dict[str, Any]]:
        return str(machine.compute_once("reference", lambda: calls.append(1) or time.sleep(0.1) or "made")), {}

    results = run_cases(tmp_path, Case("a", use_shared), Case("b", use_shared), num_concurrent=2)
    assert [verdict.text for verdict in results.of("train").values()] == ["made", "made"] and calls == [1]


@pytest.mark.slow
def test_timed_out_command_is_killed_with_its_children(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    args = (
        "from subprocess import Popen; child = Popen(['sleep', '60']); "
        f"open({str(pid_file)!r}, 'w').write(str(child.pid)); child.wait()"
    )
    start = time.monotonic()
    result = part.run_python(make_machine(tmp_path, deadline=start + 1.5), "-c", args)
    assert result.code == part.TIMED_OUT and time.monotonic() - start < 20
    with pytest.raises(AssertionError, match="did not end in time"):
        result.check()
    assert wait_until_gone(int(pid_file.read_text())), "the child of the command lives on"


def test_command_has_clean_environment_and_reports_exit_code(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("RANK", "3")
    result = part.run_python(
        make_machine(tmp_path), "-c", "import os, sys; print(os.environ.get('RANK')); sys.exit('too bad')"
    )
    assert result.code == 1 and result.text.split() == ["None", "too", "bad"]
    with pytest.raises(AssertionError, match="ended with code 1, not 0: .*too bad"):
        replace(result, text="too bad").check()


def test_summary_returns_exit_code_of_selected_cases(tmp_path: Path, capsys: Any) -> None:
    parts, results = [make_part()], run_cases(tmp_path, Case("a", passing_case), Case("c", skipped_case))
    assert program.summary(results, parts) == 0 and "== train: 1 passed, 1 skipped" in capsys.readouterr().out
    results.add("train", "late", Verdict(NOT_RUN, "no time left"))
    assert program.summary(results, parts) == NOT_RUN_CODE
    results.add("train", "b", Verdict(FAILED, "wrong"))
    assert program.summary(results, parts) == 1
    assert program.summary(results, parts, skip=["b"]) == NOT_RUN_CODE
    assert program.summary(results, parts, only=["a"], skip=["late"]) == 0, "cases of other steps do not count"
    assert program.summary(results, [make_part(always_runs=True)], only=["a"], skip=["late"]) == 1


def test_parts_share_short_time_in_proportion_and_tables_always_run() -> None:
    first, second = make_part(budget_s=300.0), make_part(budget_s=100.0)
    tables = make_part(budget_s=20.0, always_runs=True)
    parts = [first, second, tables]
    assert program.time_limit_s(parts, 220.0) == 150 and program.time_limit_s(parts[1:], 70.0) == 50
    assert program.time_limit_s(parts[1:], 200.0) == 180, "the first part left some of its time"
    assert program.time_limit_s(parts, 9000.0) == program.MAX_PART_S
    assert program.time_limit_s(parts, 9000.0, 30.0) == 0.75 * (9000 - 30 * 20), "not limited on a busy machine"
    assert program.time_limit_s(parts[2:], 9000.0, 30.0) == 30 * 20
    assert program.time_limit_s(parts[1:], 10.0) == 0 and program.time_limit_s(parts[2:], 20.0) == 20


def test_default_time_leaves_time_for_each_part_within_ten_minutes() -> None:
    """The first GPU is lent for commands of 10 minutes; a part without time would not report what it is for."""
    parts = [program.load_part(name) for name in program.PART_NAMES]
    assert program.parse_args([]).minutes <= 9.5 and program.PART_NAMES[0] == "speed"
    remaining_s = program.parse_args([]).minutes * 60
    for part_idx in range(len(parts)):
        limit_s = program.time_limit_s(parts[part_idx:], remaining_s)
        assert limit_s >= (5 if parts[part_idx].always_runs else 75)
        remaining_s -= limit_s
    assert remaining_s >= 0


def test_commit_is_read_from_flag_without_git(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    from megatron.training import run_record

    monkeypatch.setattr(run_record, "_git", lambda root, *args: (_ for _ in ()).throw(OSError("no git")))
    args = ["--device", "cpu", "--out", str(tmp_path), "tables"]
    assert program.main(args) == 0 and "the commit is unknown" in capsys.readouterr().out
    assert program.main([*args, "--commit", "0123456789"]) == 0
    assert "the commit is unknown" not in capsys.readouterr().out
    commits = {json.loads(path.read_text())["commit"] for path in tmp_path.glob("*.json")}
    assert commits == {program.UNKNOWN, "0123456789"}


def test_command_is_killed_with_program(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    code = (
        "import sys; from pathlib import Path; from benchmarks.gpu.part import run_python; "
        "from tests.benchmarks.gpu.made import make_dry_machine; "
        f"run_python(make_dry_machine(Path({str(tmp_path)!r})), '-c', 'import os, time; "
        f'open("{pid_file}", "w").write(str(os.getpid())); time.sleep(60)\')'
    )
    process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT)
    for _ in range(400):
        if pid_file.exists() and pid_file.read_text():
            break
        time.sleep(0.05)
    process.kill()
    process.wait()
    assert wait_until_gone(int(pid_file.read_text()))


def test_unknown_part_is_rejected(capsys: Any) -> None:
    with pytest.raises(SystemExit) as stop:
        program.parse_args(["trian"])
    assert stop.value.code == 2 and "a part must be one of speed, tests, train," in capsys.readouterr().err


def test_program_exits_with_message_without_gpu(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(
        SystemExit, match="a GPU and a CUDA build of torch are required.*--device cpu to test this program"
    ):
        program.make_machine("cuda", tmp_path, tmp_path)


def test_script_runs_from_any_folder(tmp_path: Path) -> None:
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"PYTHON": sys.executable}
    result = subprocess.run(
        ["bash", str(ROOT / "benchmarks" / "gpu" / "run.sh"), "--help"],
        cwd=tmp_path, env=env, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert result.returncode == 0 and "usage: benchmarks/gpu/run.sh" in result.stdout, result.stderr
