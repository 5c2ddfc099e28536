"""Complete output of failed cases in one archive, which also exists after the program is killed."""

from __future__ import annotations

import json
import os
import tarfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import logs, part
from benchmarks.gpu.part import FAILED, NOT_RUN, PASSED, Case, Machine, Part, Results, run_part, run_python
from tests.benchmarks.gpu.made import make_dry_machine

ABOUT = {"device": "NVIDIA H200", "kind": "cuda", "is_dry": False, "date": "2026-11-24", "commit": "abc"}


def print_and_fail(machine: Machine, folder: Path) -> tuple[str, dict[str, Any]]:
    run_python(machine, "-c", "print('x' * 5000 + 'end of the first')").check()
    run_python(machine, "-c", "import sys; print('second'); sys.exit(3)").check()
    raise RuntimeError("not reached")


def print_and_pass(machine: Machine, folder: Path) -> tuple[str, dict[str, Any]]:
    return run_python(machine, "-c", "print('fine')").check().text.strip(), {}


def raise_error(machine: Machine, folder: Path) -> tuple[str, dict[str, Any]]:
    raise KeyError("weights")


def run_cases(folder: Path, *cases: Case, again: tuple[str, ...] = ()) -> Results:
    results = Results.continue_or_start(folder / "out", ABOUT)
    machine = replace(make_dry_machine(folder / "work"), logs=folder / "logs", results=results)
    run_part(
        Part("train", "a part", lambda _: cases), machine, results, repeated_statuses=again, print_line=lambda _: None
    )
    return results


def read_archive(results: Results) -> dict[str, str]:
    with tarfile.open(logs.archive_path(results)) as archive:
        return {name: archive.extractfile(name).read().decode() for name in archive.getnames()}  # type: ignore[union-attr]


def test_archive_has_all_output_of_failed_cases_only(tmp_path: Path) -> None:
    results = run_cases(
        tmp_path, Case("a --flag", print_and_fail), Case("good", print_and_pass), Case("error", raise_error)
    )
    files = read_archive(results)
    assert sorted(files) == ["train/a---flag/01.log", "train/a---flag/02.log", "train/error/traceback.log"]
    assert "x" * 5000 + "end of the first" in files["train/a---flag/01.log"]
    assert files["train/a---flag/02.log"].startswith("$ ") and "second" in files["train/a---flag/02.log"]
    assert "KeyError: 'weights'" in files["train/error/traceback.log"]
    assert logs.archive_path(results).name == "gpu-nvidia-h200-2026-11-24-logs.tgz"


def test_later_start_archives_failures_of_earlier_one(tmp_path: Path) -> None:
    run_cases(tmp_path, Case("first", print_and_fail))
    results = run_cases(tmp_path, Case("second", raise_error))
    assert {name.split("/")[1] for name in read_archive(results)} == {"first", "second"}
    results = run_cases(tmp_path, Case("first", raise_error), again=(FAILED,))
    assert "train/first/01.log" not in read_archive(results), "the repeated case has new logs"


def test_no_archive_without_failures(tmp_path: Path) -> None:
    results = run_cases(tmp_path, Case("good", print_and_pass))
    assert results.of("train")["good"].status == PASSED and not logs.archive_path(results).exists()
    assert logs.write_archive(tmp_path / "logs", results) is None


def test_cut_off_case_is_archived(tmp_path: Path) -> None:
    results = Results.continue_or_start(tmp_path, ABOUT)
    (tmp_path / "logs" / "train" / "late").mkdir(parents=True)
    (tmp_path / "logs" / "train" / "late" / "01.log").write_text("half of it")
    results.add("train", "late", part.Verdict(NOT_RUN, "killed"))
    logs.write_archive(tmp_path / "logs", results)
    assert read_archive(results) == {"train/late/01.log": "half of it"}


def test_long_logs_are_shortened_and_old_ones_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "HEAD_BYTES", 10)
    monkeypatch.setattr(logs, "TAIL_BYTES", 20)
    path = tmp_path / "01.log"
    path.write_text("begin" + "-" * 1000 + "end")
    text = logs.shorten(path).decode()
    assert text.startswith("begin-----\n[... 978 bytes left out ...]\n") and text.endswith("-end") and len(text) < 100
    monkeypatch.setattr(logs, "MAX_TOTAL_BYTES", 40)
    paths = [tmp_path / name for name in ("a.log", "b.log")]
    for age, log in enumerate(paths):
        log.write_text("x" * 30)
        os.utime(log, (1000 + age, 1000 + age))
    assert logs._newest(paths) == [paths[1]]


def test_results_are_readable_next_to_archive(tmp_path: Path) -> None:
    """A later start continues the results and must not read the archive."""
    run_cases(tmp_path, Case("a", raise_error))
    assert json.loads(Results.continue_or_start(tmp_path / "out", ABOUT).path.read_text())["commit"] == "abc"
