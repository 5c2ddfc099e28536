"""Part ``tests``: the suite's tests for a GPU, file by file, and what of the suite tells most about this torch.

| case | runs | on |
|---|---|---|
| gpu: FILE | ``pytest -m gpu --all`` of every file that has such tests | the device |
| suite: FOLDER | folders of the ordinary suite | the CPU, by this machine's Python and torch |

A case fails with the names of the tests that did and the first line of why; it tells what was skipped and the reasons,
and which attention kernels ran. Not one test may be missing: a file of which none was run is no success.
"""

from __future__ import annotations

import os
import re
import sys
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.gpu.part import ROOT, TIMED_OUT, Case, Done, Machine, Part, Skip, command

MARK = "pytest.mark.gpu"
OWN = "tests/gpu"
FIRST = ("test_attention.py", "test_families.py", "test_optimizer.py")
"""Files of ``OWN`` that tell most; the others follow by name, and then those elsewhere."""
SUITE: dict[str, tuple[str, ...]] = {
    "mpu": ("tests/mpu",),
    "ops": ("tests/ops",),
    "models": ("tests/models",),
    "optim": ("tests/optim",),
    "DeepSpeed's contract": ("tests/tds/test_deepspeed_contract.py", "tests/tds/test_private_names.py"),
    "tds": ("tests/tds/test_parity.py", "tests/tds/engine/test_engine.py", "tests/tds/p2p/test_exchange.py"),
    "runs": ("tests/training/test_golden.py", "tests/training/test_resume.py", "tests/training/test_compiled.py"),
    "checkpoints": ("tests/checkpoint/test_layouts.py", "tests/checkpoint/test_background.py"),
}
DRY = {"ops": ("tests/models/common/test_norm.py", "tests/ops/test_gelu.py")}
NO_GPU = {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}
"""Of the ordinary suite, which was written on machines without one."""
NAMES_TOLD, LETTERS_OF_A_REASON = 6, 150
RESULT = re.compile(
    r"^(?:\[gw\d+\] \[ *\d+%\] (?P<first>\w+) )?(?P<name>\S+\.py::.+?)(?: (?P<last>PASSED|FAILED|ERROR|SKIPPED)\b.*)?$",
    re.MULTILINE,
)
"""A line of ``pytest -v``: of one process, of several, or of a test that has not ended."""


@dataclass
class Report:
    """What a run of pytest has found.

    Attributes:
        failed: test -> first line of why; also one that could not be set up, and a file that could not be read.
        skipped: reason -> number of tests.
        told: properties that tests have recorded, such as the kernel that ran.
    """

    passed: int = 0
    failed: dict[str, str] = field(default_factory=dict)
    skipped: Counter[str] = field(default_factory=Counter)
    told: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """The whole in a line, the failed ones by name."""
        names = [f"{name}: {why}" for name, why in list(self.failed.items())[:NAMES_TOLD]]
        more = len(self.failed) - len(names)
        return "; ".join(
            [
                f"{self.passed} passed" + (f", {len(self.failed)} failed" if self.failed else ""),
                *names,
                *([f"and {more} more failed"] if more > 0 else []),
                *(f"{number} skipped: {reason}" for reason, number in self.skipped.most_common()),
                *self.told,
            ]
        )

    @property
    def figures(self) -> dict[str, Any]:
        """The same for tables."""
        return {
            "passed": self.passed,
            "failed": len(self.failed),
            "skipped": sum(self.skipped.values()),
            "kernels": self.told,
        }


def read_report(path: Path) -> Report:
    """Return what a file of ``pytest --junitxml`` says."""
    report = Report()
    for case in ET.parse(path).getroot().iter("testcase"):
        name = "::".join(filter(None, (case.get("classname", "").rpartition(".")[2], case.get("name", ""))))
        wrong = [child for child in case if child.tag in ("failure", "error")]
        skipped = case.find("skipped")
        if wrong:
            report.failed[name] = _first_line(wrong[0])
        elif skipped is not None:
            report.skipped[skipped.get("message", "")] += 1
        else:
            report.passed += 1
        report.told += [each.get("value", "") for each in case.iter("property")]
    return report


def _first_line(problem: ET.Element) -> str:
    """Return why a test failed: pytest's message, or what the traceback ends in where that says nothing."""
    message = " ".join((problem.get("message") or "").split())
    if message in ("", "collection failure", "failed on setup with") and problem.text:
        found = [line[1:].strip() for line in problem.text.splitlines() if line.startswith("E ")]
        message = found[0] if found else problem.text.strip().splitlines()[-1]
    return message[:LETTERS_OF_A_REASON]


def judge(done: Done, path: Path) -> tuple[str, dict[str, Any]]:
    """Return the line and the figures of a run of pytest that has ended.

    Raises:
        AssertionError: a test failed, or pytest did not come to its end.
        Skip: every test was skipped; with the reasons.
    """
    if done.code == TIMED_OUT:
        raise AssertionError(_in_time(done))
    report = read_report(path) if path.exists() else Report()
    if report.failed:
        raise AssertionError(report.text)
    if done.code:  # interrupted, broken, wrongly called, no such test
        raise AssertionError(f"pytest ended with code {done.code}: {done.text[-1000:]}")
    if not report.passed:
        raise Skip(report.text)
    return report.text, report.figures


def _in_time(done: Done) -> str:
    """Return how far a run came that had to be ended: pytest writes its report at the end only."""
    lines = [(found["first"] or found["last"], found["name"].strip()) for found in RESULT.finditer(done.text)]
    ended = [(result, name) for result, name in lines if result is not None]
    failed = [name for result, name in ended if result in ("FAILED", "ERROR")]
    running = lines[-1][1] if lines and lines[-1][0] is None else ""
    return (
        f"did not end in {done.seconds:.0f} s, after {len(ended)} tests"
        + (f" of which failed: {', '.join(failed[:NAMES_TOLD])}" if failed else "")
        + (f"; in {running}" if running else "")
    )


def pytest_of(
    paths: Sequence[str], words: Sequence[str], machine: Machine, folder: Path, *, env: Mapping[str, str] | None = None
) -> tuple[str, dict[str, Any]]:
    """Run these tests and return what is told of them."""
    report = folder / "report.xml"
    report.unlink(missing_ok=True)
    asked = ["-p", "no:cacheprovider", "-vv", "--tb=short", f"--junitxml={report}", f"--basetemp={folder / 'tmp'}"]
    done = command(machine, [sys.executable, "-m", "pytest", *asked, *words, *paths], env)
    (folder / "output").write_text(done.text, encoding="utf-8")
    return judge(done, report)


def gpu_files() -> list[str]:
    """Return the files that have tests for a GPU, the most telling first."""
    files = [
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "tests").rglob("test_*.py")
        if f"@{MARK}" in (text := path.read_text(encoding="utf-8")) or f"pytestmark = {MARK}" in text
    ]

    def place(file: str) -> tuple[bool, int, str]:
        folder, _, name = file.rpartition("/")
        return folder != OWN, FIRST.index(name) if name in FIRST else len(FIRST), file

    return sorted(files, key=place)


def cases(machine: Machine) -> list[Case]:
    """Return a case for each file with tests for a GPU, and one for each part of the suite."""
    kind = ["-m", "gpu", "-p", "no:xdist", f"--gpu-device={machine.kind}"]
    made = []
    for file in gpu_files():
        words = [*kind, *([] if machine.is_dry else ["--all"])]
        run = partial(pytest_of, [file], words, env={"DS_ACCELERATOR": machine.kind})
        made.append(Case(f"gpu: {file.removeprefix('tests/')}", run, limit_s=200.0))
    workers = max(1, min(4, machine.num_cores // 4))
    words = ["-n", str(workers), "--dist", "loadfile"] if workers > 1 else ["-p", "no:xdist"]
    for name, paths in (DRY if machine.is_dry else SUITE).items():
        made.append(Case(f"suite: {name}", partial(pytest_of, paths, words, env=NO_GPU), limit_s=150.0))
    return made


AT_ONCE = max(1, min(4, len(os.sched_getaffinity(0)) // 4))
"""Files at a time: each is a process with a context of its own on the GPU, of half a gigabyte, and small tensors."""
PART = Part("tests", "the suite's tests on the device, and the suite on this torch", cases, 300.0, at_once=AT_ONCE)
