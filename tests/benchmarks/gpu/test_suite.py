"""Part ``tests``: a failed test is told by name with the first line of why, a skipped one with its reason."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks.gpu import checks, part
from benchmarks.gpu.part import ROOT, TIMED_OUT, CompletedCommand, Machine, Skip
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


def make_machine(folder: Path) -> Machine:
    return Machine("cpu", "CPU", True, 1, 2**30, 2, folder, folder, deadline=time.monotonic() + 100)


def run_tests(folder: Path, text: str, *flags: str) -> tuple[str, dict[str, object]]:
    """Return what the part tells of a file with these tests."""
    (folder / "test_made.py").write_text(text)
    flags = ("-p", "no:xdist", "-p", "no:hypothesispytest", *flags)
    return checks.run_pytest([str(folder / "test_made.py")], flags, make_machine(folder), folder)


def test_failed_tests_are_reported_with_reason(tmp_path: Path) -> None:
    with pytest.raises(AssertionError) as error:
        run_tests(tmp_path, SOURCE)
    entries = str(error.value).split("; ")
    assert entries[0] == "2 passed, 3 failed"
    assert entries[1].startswith("test_made::test_bad: AssertionError: the sum is off")
    assert entries[2].startswith("test_made::test_other: KeyError: 'no such thing'")
    assert "test_made::test_with_broken: " in entries[3] and "cannot be set up" in entries[3]
    assert entries[4:] == ["1 skipped: needs two of them", "flash for a", "flash for b"]


def test_passed_tests_and_recorded_properties_are_reported(tmp_path: Path) -> None:
    text, figures = run_tests(tmp_path, SOURCE, "-k", "good or left_out")
    assert text == "2 passed; 1 skipped: needs two of them; flash for a; flash for b"
    assert figures == {"passed": 2, "failed": 0, "skipped": 1, "kernels": ["flash for a", "flash for b"]}


@pytest.mark.slow
def test_file_without_run_tests_does_not_pass(tmp_path: Path) -> None:
    with pytest.raises(Skip, match="needs two of them"):
        run_tests(tmp_path, SOURCE, "-k", "left_out")
    with pytest.raises(AssertionError, match="pytest ended with code 5"):
        run_tests(tmp_path, SOURCE, "-k", "nothing_of_that_name")
    with pytest.raises(AssertionError, match="cannot_be_imported"):
        run_tests(tmp_path, "import cannot_be_imported")


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
def test_timed_out_run_reports_its_progress(lines: str, tmp_path: Path) -> None:
    result = CompletedCommand(TIMED_OUT, f"collected 9 items\n\n{lines}", 61.4)
    with pytest.raises(AssertionError) as error:
        checks.judge_pytest(result, tmp_path / "none.xml")
    assert str(error.value) == (
        "did not end in 61 s, after 2 tests of which failed: tests/gpu/test_a.py::test_two; in "
        "tests/gpu/test_a.py::test_three"
    )


def test_many_failures_keep_first_reasons() -> None:
    """A verdict has 1,500 letters, of which the end is kept."""
    failed = {f"test_gpu::test_number_{i}": "x" * checks.MAX_REASON_CHARS for i in range(50)}
    text = checks.PytestReport(3, failed).text
    assert len(text) < 1500 and text.startswith("3 passed, 50 failed; test_gpu::test_number_0: ")
    assert text.endswith("and 44 more failed")


def test_cases_cover_every_gpu_test_file(tmp_path: Path) -> None:
    files = checks.gpu_files()
    gpu_test_names = {path.name for path in (ROOT / checks.GPU_TEST_DIR).glob("test_*.py")} - {"test_dry_form.py"}
    assert {Path(file).name for file in files if file.startswith(checks.GPU_TEST_DIR)} == gpu_test_names
    assert {"tests/mpu/test_uploads.py", "tests/tds/test_clock.py", "tests/training/test_host_reads.py"} < set(files)
    assert [Path(file).name for file in files[:3]] == list(checks.FIRST_FILES)
    names = [case.name for case in checks.suite_cases(make_machine(tmp_path))]
    num_cases = len(files) + sum(number - 1 for number in checks.NUM_SHARDS.values()) + len(checks.DRY_SUITE)
    assert len(names) == len(set(names)) == num_cases and set(checks.NUM_SHARDS) <= set(files)
    assert all(
        (ROOT / path).exists() for paths in (*checks.SUITE.values(), *checks.DRY_SUITE.values()) for path in paths
    )


def test_shards_have_each_test_once(tmp_path: Path) -> None:
    from tests.conftest import select_shard

    class Config:
        def __init__(self, shard: str) -> None:
            self.shard, self.dropped = shard, list[int]()
            self.hook = SimpleNamespace(pytest_deselected=lambda items: self.dropped.extend(items))

        def getoption(self, name: str) -> str:
            return self.shard

    shards, all_items = [], list(range(13))
    for idx in range(1, 6):
        config, items = Config(f"{idx}/5"), list(all_items)
        select_shard(config, items)  # type: ignore[arg-type]
        assert sorted([*items, *config.dropped]) == all_items
        shards.append(items)
    assert sorted(sum(shards, [])) == all_items and {len(items) for items in shards} == {2, 3}
    for wrong in ("0/5", "6/5", "1", "a/b"):
        with pytest.raises(pytest.UsageError, match="--gpu-shard must be I/N"):
            select_shard(Config(wrong), [])  # type: ignore[arg-type]
    words = [
        case.run.args[1][-1]  # type: ignore[attr-defined]
        for case in checks.suite_cases(make_machine(tmp_path))
        if "test_documents.py" in case.name and "gpu/" in case.name
    ]
    assert words == [f"--gpu-shard={idx}/5" for idx in range(1, 6)]


def test_tests_extend_pythonpath() -> None:
    """They come by PYTHONPATH where run.sh has installed them: a process of a test must go on with what is there."""
    hides = [
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "tests").rglob("*.py")
        if '"PYTHONPATH": ' in (text := path.read_text(encoding="utf-8")) and 'environ.get("PYTHONPATH' not in text
    ]
    assert not hides, "what PYTHONPATH held must stay behind what is put there"


def test_gpu_is_visible_to_gpu_tests_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    environment: dict[str, str] = {}

    def record_environment(
        machine: Machine, command_line: Sequence[str], env: Mapping[str, str] | None = None
    ) -> CompletedCommand:
        case_env = part.environment(machine, env)
        environment.update({name: case_env.get(name) for name in ("CUDA_VISIBLE_DEVICES", "DS_ACCELERATOR")})
        return CompletedCommand(5, "no test", 0.1)

    monkeypatch.setattr(checks, "run_command", record_environment)
    gpu_machine = replace(make_machine(tmp_path), device_type="cuda", is_dry=False)
    for case in checks.suite_cases(gpu_machine):
        with pytest.raises(AssertionError, match="code 5"):
            case.run(gpu_machine, tmp_path)
        assert tuple(environment.values()) == (("0", "cuda") if case.name.startswith("gpu: ") else ("", "cpu")), (
            case.name
        )


def test_each_activation_has_reference_formula() -> None:
    """Those of tests/gpu/test_ops.py, which run where there is a GPU, or in the dry form below."""
    assert FORMULAS.keys() == ACTIVATIONS.keys()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_dry_run_passes_and_skips_cuda_only_cases(tmp_path: Path) -> None:
    from benchmarks.gpu.part import run_command

    base_command = [
        sys.executable,
        "-m",
        "benchmarks.gpu",
        "--device",
        "cpu",
        "--out",
        str(tmp_path),
        "tests",
        "--only",
    ]
    result = run_command(make_machine(tmp_path), [*base_command, "ops"]).check()
    assert "passed   tests: gpu: gpu/test_ops.py" in result.text and "passed   tests: suite: ops" in result.text
    result = run_command(make_machine(tmp_path), [*base_command, "clock"]).check()
    assert (
        "skipped  tests: gpu: tds/test_clock.py" in result.text and "CUDA's own: events on its streams" in result.text
    )
