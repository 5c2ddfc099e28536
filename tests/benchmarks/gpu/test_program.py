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
ABOUT = {"device": "NVIDIA H200", "kind": "cuda", "is_dry": False, "date": "2026-11-24", "commit": "abc"}


def machine_in(folder: Path, **others: Any) -> Machine:
    """Return a CPU in the device's place."""
    return Machine("cpu", "CPU", True, 1, 2**34, 2, folder / "work", folder / "out", **others)


def passes(machine: Machine, folder: Path) -> tuple[str, dict[str, Any]]:
    return "seen", {"number": 3}


def is_wrong(machine: Machine, folder: Path) -> tuple[str, dict[str, Any]]:
    raise AssertionError("the loss must be 1,\n  got 2")


def breaks(machine: Machine, folder: Path) -> tuple[str, dict[str, Any]]:
    raise KeyError("weights")


def lacks(machine: Machine, folder: Path) -> tuple[str, dict[str, Any]]:
    raise Skip("needs two GPUs, there is one")


def part_of(*cases: Case, **others: Any) -> Part:
    return Part("train", "a part", lambda machine: cases, **others)


def is_gone(pid: int) -> bool:
    """Whether a process ends within some seconds."""
    for _ in range(200):
        try:
            if " Z " in Path(f"/proc/{pid}/stat").read_text():
                return True
        except FileNotFoundError:
            return True
        time.sleep(0.05)
    return False


def run(
    folder: Path, *cases: Case, lines: list[str] | None = None, results: Results | None = None, **others: Any
) -> Results:
    """Run the cases in ``folder`` and return their results."""
    results = results or Results.begin_or_go_on(folder / "out", ABOUT)
    said: list[str] = [] if lines is None else lines
    again = others.pop("again", ())
    run_part(part_of(*cases, **others), machine_in(folder), results, again=again, say=said.append)
    return results


def test_a_case_that_fails_or_breaks_is_told_in_a_line_and_the_others_run(tmp_path: Path) -> None:
    lines: list[str] = []
    run(tmp_path, Case("a", is_wrong), Case("b", breaks), Case("c", lacks), Case("d", passes), lines=lines)
    assert [line.split(" (")[0] for line in lines[1:]] == [
        "failed   train: a", "failed   train: b", "skipped  train: c", "passed   train: d",
    ]  # fmt: skip
    assert lines[1].endswith("the loss must be 1, | got 2") and "KeyError: 'weights'" in lines[2]
    (file,) = (tmp_path / "out").iterdir()
    assert file.name == "gpu-nvidia-h200-2026-11-24.json"
    content = json.loads(file.read_text())
    assert content["commit"] == "abc" and content["parts"]["train"]["cases"]["d"]["figures"] == {"number": 3}
    assert {name: one["status"] for name, one in content["parts"]["train"]["cases"].items()} == {
        "a": FAILED, "b": FAILED, "c": SKIPPED, "d": PASSED,
    }  # fmt: skip


def test_a_second_start_runs_what_is_missing_alone(tmp_path: Path) -> None:
    calls: list[str] = []

    def counted(name: str) -> Case:
        return Case(name, lambda machine, folder: (calls.append(name) or "seen", {}))

    run(tmp_path, counted("first"), budget_s=60.0)
    found = run(tmp_path, counted("first"), counted("second"), budget_s=0.0)
    assert found.of("train")["second"].status == NOT_RUN and calls == ["first"]
    run(tmp_path, counted("first"), counted("second"))
    assert calls == ["first", "second"] and len(list((tmp_path / "out").iterdir())) == 1
    run(tmp_path, counted("first"), counted("second"), again=FINAL)
    assert calls == ["first", "second"] * 2


def test_what_failed_is_repeated_alone_where_that_is_asked_for(tmp_path: Path) -> None:
    run(tmp_path, Case("good", passes), Case("bad", is_wrong), Case("lacking", lacks))
    again = program.parse_args(["--failed"]).again
    found = run(tmp_path, *(Case(name, passes) for name in ("good", "bad", "lacking")), again=again)
    assert [one.status for one in found.of("train").values()] == [PASSED, PASSED, SKIPPED]
    assert set(program.parse_args(["--again"]).again) == set(FINAL) and not program.parse_args([]).again


@pytest.mark.slow
def test_a_case_that_is_cut_off_with_its_part_has_not_failed(tmp_path: Path) -> None:
    """Nor does one begin that would be cut off at once; one that takes longer than its own limit has failed."""

    def is_slow(machine: Machine, folder: Path) -> tuple[str, dict[str, Any]]:
        part.python(machine, "-c", "import time; time.sleep(60)").check()
        return "", {}

    slow, short = Case("slow", is_slow), Case("short", is_slow, limit_s=1.0)
    found = run(tmp_path, slow, budget_s=1.5).of("train")
    assert found["slow"].status == NOT_RUN and found["slow"].seconds < 20
    assert "killed at the end of the part's 2 s" in found["slow"].text and "did not end in time" in found["slow"].text
    late = run(tmp_path, Case("first", lambda *_: (time.sleep(1.4), ("", {}))[1]), Case("late", passes), budget_s=1.5)
    assert [late.of("train")[name].status for name in ("first", "late")] == [PASSED, NOT_RUN]
    assert run(tmp_path, short, budget_s=60.0).of("train")["short"].status == FAILED


def test_results_of_another_commit_or_device_are_left_alone(tmp_path: Path) -> None:
    first = Results.begin_or_go_on(tmp_path, ABOUT)
    first.add("train", "a", Verdict(PASSED, "seen"))
    assert Results.begin_or_go_on(tmp_path, ABOUT | {"date": "2026-11-25"}).path == first.path
    later = Results.begin_or_go_on(tmp_path, ABOUT | {"commit": "def"})
    assert later.of("train") == {} and later.path.name == "gpu-nvidia-h200-2026-11-24-2.json"
    assert (
        Results.begin_or_go_on(tmp_path, ABOUT | {"device": "NVIDIA L4"}).path.name == "gpu-nvidia-l4-2026-11-24.json"
    )


def test_cases_run_side_by_side_but_for_one_that_is_alone(tmp_path: Path) -> None:
    inside: list[int] = []
    seen: dict[str, int] = {}

    def noting(name: str) -> Any:
        def take(machine: Machine, folder: Path) -> tuple[str, dict[str, Any]]:
            inside.append(1)
            time.sleep(0.1)
            seen[name] = max(seen.get(name, 0), len(inside))
            time.sleep(0.1)
            inside.pop()
            return "", {}

        return take

    cases = [
        Case("a", noting("a")),
        Case("b", noting("b")),
        Case("alone", noting("alone"), alone=True),
        Case("c", noting("c")),
    ]
    run(tmp_path, *cases, at_once=4)
    assert seen["alone"] == 1 and max(seen["a"], seen["b"], seen["c"]) > 1


def test_what_cases_share_is_made_once(tmp_path: Path) -> None:
    made: list[int] = []

    def shares(machine: Machine, folder: Path) -> tuple[str, dict[str, Any]]:
        return str(machine.once("reference", lambda: made.append(1) or time.sleep(0.1) or "made")), {}

    found = run(tmp_path, Case("a", shares), Case("b", shares), at_once=2)
    assert [one.text for one in found.of("train").values()] == ["made", "made"] and made == [1]


@pytest.mark.slow
def test_a_command_that_does_not_end_is_ended_with_what_it_started(tmp_path: Path) -> None:
    note = tmp_path / "pid"
    words = (
        "from subprocess import Popen; child = Popen(['sleep', '60']); "
        f"open({str(note)!r}, 'w').write(str(child.pid)); child.wait()"
    )
    start = time.monotonic()
    done = part.python(machine_in(tmp_path, end=start + 1.5), "-c", words)
    assert done.code == part.TIMED_OUT and time.monotonic() - start < 20
    with pytest.raises(AssertionError, match="did not end in time"):
        done.check()
    assert is_gone(int(note.read_text())), "the child of the command lives on"


def test_a_command_has_no_rank_of_another_job_and_its_end_is_told(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("RANK", "3")
    done = part.python(machine_in(tmp_path), "-c", "import os, sys; print(os.environ.get('RANK')); sys.exit('too bad')")
    assert done.code == 1 and done.text.split() == ["None", "too", "bad"]
    with pytest.raises(AssertionError, match="ended with code 1, not 0: .*too bad"):
        replace(done, text="too bad").check()


def test_the_summary_ends_with_1_where_a_case_failed(tmp_path: Path, capsys: Any) -> None:
    results = run(tmp_path, Case("a", passes), Case("c", lacks))
    assert program.summary(results, ["train"]) == 0 and "== train: 1 passed, 1 skipped" in capsys.readouterr().out
    results.add("train", "b", Verdict(FAILED, "wrong"))
    assert program.summary(results, ["train"]) == 1


def test_what_a_part_leaves_is_for_the_next_and_the_pictures_are_always_made() -> None:
    first, second = part_of(budget_s=300.0), part_of(budget_s=400.0)
    tables = part_of(budget_s=20.0, is_always=True)
    parts = [first, second, tables]
    assert program.share_of(parts, 720.0) == 300 and program.share_of(parts, 800.0) == 380
    assert program.share_of(parts, 9000.0) == program.LONGEST_S
    assert program.share_of(parts, 100.0) == 80 and program.share_of(parts[1:], 10.0) == 0
    assert program.share_of(parts[2:], 20.0) == 20


def test_a_commit_is_taken_from_the_command_line_where_there_is_no_git(
    tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    from megatron.training import run_record

    monkeypatch.setattr(run_record, "_git", lambda root, *words: (_ for _ in ()).throw(OSError("no git")))
    words = ["--device", "cpu", "--out", str(tmp_path), "tables"]
    assert program.main(words) == 0 and "the commit is unknown" in capsys.readouterr().out
    assert program.main([*words, "--commit", "0123456789"]) == 0
    assert "the commit is unknown" not in capsys.readouterr().out
    commits = {json.loads(path.read_text())["commit"] for path in tmp_path.glob("*.json")}
    assert commits == {program.UNKNOWN, "0123456789"}


def test_a_command_dies_with_the_program(tmp_path: Path) -> None:
    note = tmp_path / "pid"
    code = (
        "import sys; from pathlib import Path; from benchmarks.gpu.part import python; "
        "from tests.benchmarks.gpu.made import dry_machine; "
        f"python(dry_machine(Path({str(tmp_path)!r})), '-c', 'import os, time; "
        f'open("{note}", "w").write(str(os.getpid())); time.sleep(60)\')'
    )
    program_ = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT)
    for _ in range(400):
        if note.exists() and note.read_text():
            break
        time.sleep(0.05)
    program_.kill()
    program_.wait()
    assert is_gone(int(note.read_text()))


def test_all_parts_have_time_in_one_start() -> None:
    assert sum(program.part_of(name).budget_s for name in program.NAMES) <= program.TOTAL_S <= 26 * 60
    assert program.LONGEST_S <= 8 * 60


def test_an_unknown_part_is_refused(capsys: Any) -> None:
    with pytest.raises(SystemExit) as stop:
        program.parse_args(["trian"])
    assert stop.value.code == 2 and "a part must be one of tests, train," in capsys.readouterr().err


def test_without_a_gpu_the_program_ends_with_words(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(
        SystemExit, match="a GPU and a CUDA build of torch are required.*--device cpu to test this program"
    ):
        program.machine_of("cuda", tmp_path, tmp_path)


def test_the_script_starts_the_program_from_any_folder(tmp_path: Path) -> None:
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"PYTHON": sys.executable}
    done = subprocess.run(
        ["bash", str(ROOT / "benchmarks" / "gpu" / "run.sh"), "--help"],
        cwd=tmp_path, env=env, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0 and "usage: benchmarks/gpu/run.sh" in done.stdout, done.stderr
