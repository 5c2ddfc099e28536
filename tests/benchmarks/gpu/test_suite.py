"""Part ``tests``: a failed test is told by name with the first line of why, a skipped one with its reason."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.gpu import checks, part
from benchmarks.gpu.part import ROOT, TIMED_OUT, Done, Machine, Skip
from megatron.ops.activations import ACTIVATIONS
from tests.gpu.test_ops import FORMULAS

SOURCE = """
import pytest

@pytest.mark.parametrize("name", ["a", "b"])
def test_good(name, record_property):
    record_property("kernel", f"flash for {name}")

def test_bad():
    assert 3 - 1 == 5, "the sum is off"

def test_other():
    raise KeyError("no such thing")

@pytest.fixture
def broken():
    raise RuntimeError("cannot be set up")

def test_with_broken(broken):
    pass

@pytest.mark.skip(reason="needs two of them")
def test_left_out():
    pass
"""


def machine(folder: Path) -> Machine:
    return Machine("cpu", "CPU", True, 1, 2**30, 2, folder, folder, end=time.monotonic() + 100)


def run(folder: Path, text: str, *words: str) -> tuple[str, dict[str, object]]:
    """Return what the part tells of a file with these tests."""
    (folder / "test_made.py").write_text(text)
    words = ("-p", "no:xdist", "-p", "no:hypothesispytest", *words)
    return checks.pytest_of([str(folder / "test_made.py")], words, machine(folder), folder)


def test_failed_tests_are_told_by_name_with_why(tmp_path: Path) -> None:
    with pytest.raises(AssertionError) as told:
        run(tmp_path, SOURCE)
    parts = str(told.value).split("; ")
    assert parts[0] == "2 passed, 3 failed"
    assert parts[1].startswith("test_made::test_bad: AssertionError: the sum is off")
    assert parts[2].startswith("test_made::test_other: KeyError: 'no such thing'")
    assert "test_made::test_with_broken: " in parts[3] and "cannot be set up" in parts[3]
    assert parts[4:] == ["1 skipped: needs two of them", "flash for a", "flash for b"]


def test_what_passed_is_counted_and_what_tests_record_is_told(tmp_path: Path) -> None:
    text, figures = run(tmp_path, SOURCE, "-k", "good or left_out")
    assert text == "2 passed; 1 skipped: needs two of them; flash for a; flash for b"
    assert figures == {"passed": 2, "failed": 0, "skipped": 1, "kernels": ["flash for a", "flash for b"]}


@pytest.mark.slow
def test_a_file_of_which_nothing_ran_is_no_success(tmp_path: Path) -> None:
    with pytest.raises(Skip, match="needs two of them"):
        run(tmp_path, SOURCE, "-k", "left_out")
    with pytest.raises(AssertionError, match="pytest ended with code 5"):
        run(tmp_path, SOURCE, "-k", "nothing_of_that_name")
    with pytest.raises(AssertionError, match="cannot_be_imported"):
        run(tmp_path, "import cannot_be_imported")


@pytest.mark.parametrize(
    "lines",
    [
        "tests/gpu/test_a.py::test_one[a b] PASSED [ 10%]\ntests/gpu/test_a.py::test_two FAILED [ 20%]\n"
        "tests/gpu/test_a.py::test_three ",
        "[gw0] [  3%] PASSED tests/gpu/test_a.py::test_one[a b] \n[gw1] [ 10%] FAILED tests/gpu/test_a.py::test_two \n"
        "tests/gpu/test_a.py::test_three ",
    ],
    ids=["one process", "several"],
)
def test_of_a_run_that_did_not_end_is_told_how_far_it_came(lines: str, tmp_path: Path) -> None:
    done = Done(TIMED_OUT, f"collected 9 items\n\n{lines}", 61.4)
    with pytest.raises(AssertionError) as told:
        checks.judge(done, tmp_path / "none.xml")
    assert str(told.value) == (
        "did not end in 61 s, after 2 tests of which failed: tests/gpu/test_a.py::test_two; in "
        "tests/gpu/test_a.py::test_three"
    )


def test_many_failures_leave_room_for_the_first_ones() -> None:
    """A verdict has 1,500 letters, of which the end is kept."""
    failed = {f"test_gpu::test_number_{i}": "x" * checks.LETTERS_OF_A_REASON for i in range(50)}
    text = checks.Report(3, failed).text
    assert len(text) < 1500 and text.startswith("3 passed, 50 failed; test_gpu::test_number_0: ")
    assert text.endswith("and 44 more failed")


def test_every_file_with_tests_for_a_gpu_is_a_case_and_every_folder_is_there(tmp_path: Path) -> None:
    files = checks.gpu_files()
    own = {path.name for path in (ROOT / checks.OWN).glob("test_*.py")} - {"test_dry_form.py"}
    assert {Path(file).name for file in files if file.startswith(checks.OWN)} == own
    assert {"tests/mpu/test_uploads.py", "tests/tds/test_clock.py", "tests/training/test_host_reads.py"} < set(files)
    assert [Path(file).name for file in files[:3]] == list(checks.FIRST)
    names = [case.name for case in checks.suite_cases(machine(tmp_path))]
    assert len(names) == len(set(names)) == len(files) + len(checks.DRY)
    assert all((ROOT / path).exists() for paths in (*checks.SUITE.values(), *checks.DRY.values()) for path in paths)


def test_no_test_hides_the_packages_that_lie_beside_this_python() -> None:
    """They come by PYTHONPATH where run.sh has installed them: a process of a test must go on with what is there."""
    hides = [
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "tests").rglob("*.py")
        if '"PYTHONPATH": ' in (text := path.read_text(encoding="utf-8")) and 'environ.get("PYTHONPATH' not in text
    ]
    assert not hides, "what PYTHONPATH held must stay behind what is put there"


def test_the_ordinary_suite_sees_no_gpu_and_the_tests_for_a_gpu_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    seen: dict[str, str] = {}

    def noting(machine: Machine, words: Sequence[str], env: Mapping[str, str] | None = None) -> Done:
        there = part.environment(machine, env)
        seen.update({name: there.get(name) for name in ("CUDA_VISIBLE_DEVICES", "DS_ACCELERATOR")})
        return Done(5, "no test", 0.1)

    monkeypatch.setattr(checks, "command", noting)
    place = replace(machine(tmp_path), kind="cuda", is_dry=False)
    for case in checks.suite_cases(place):
        with pytest.raises(AssertionError, match="code 5"):
            case.run(place, tmp_path)
        assert tuple(seen.values()) == (("0", "cuda") if case.name.startswith("gpu: ") else ("", "cpu")), case.name


def test_each_activation_has_its_formula() -> None:
    """Those of tests/gpu/test_ops.py, which run where there is a GPU, or in the dry form below."""
    assert FORMULAS.keys() == ACTIVATIONS.keys()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_dry_form_of_some_cases_passes_and_says_what_is_cudas_own(tmp_path: Path) -> None:
    from benchmarks.gpu.part import command

    words = [sys.executable, "-m", "benchmarks.gpu", "--device", "cpu", "--out", str(tmp_path), "tests", "--only"]
    done = command(machine(tmp_path), [*words, "ops"]).check()
    assert "passed   tests: gpu: gpu/test_ops.py" in done.text and "passed   tests: suite: ops" in done.text
    done = command(machine(tmp_path), [*words, "clock"]).check()
    assert "skipped  tests: gpu: tds/test_clock.py" in done.text and "CUDA's own: events on its streams" in done.text
