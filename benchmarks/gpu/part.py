"""Parts of the GPU benchmark: named cases that run one or several at a time within a time budget and end in a verdict.

The verdicts are saved in one JSON file, ``gpu-<device>-<date>.json``, so that a second start can continue:

    {"device": "NVIDIA H200", "kind": "cuda", "date": "2026-11-24", "commit": "...", "versions": {...}, "is_dry": false,
     "parts": {"train": {"seconds": 61.2, "cases": {"gpt2 bf16": {"status": "passed", "text": "...", "figures": {...},
     "seconds": 8.1}}}}}

Every command of a case writes its complete output to a file in the folder of logs (``benchmarks.gpu.logs``).
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import IO, Any

from benchmarks.gpu import logs

PASSED, FAILED, SKIPPED, NOT_RUN = "passed", "failed", "skipped", "not run"
FINAL = (PASSED, FAILED, SKIPPED)
"""Verdicts that a second start does not repeat."""
NOT_RUN_CODE = 75
"""Exit code of the benchmark if no selected case failed, but at least one was not run."""


@dataclass(frozen=True)
class Verdict:
    """The result of a case.

    Args:
        status: PASSED, FAILED, SKIPPED (not possible on this machine; the text has the reason) or NOT_RUN (no time
            left).
        text: one line with the observation and the requirement.
        figures: numbers for tables, as JSON values.
    """

    status: str
    text: str
    figures: Mapping[str, Any] = field(default_factory=dict)
    seconds: float = 0.0


class Results:
    """The verdicts of all parts so far. The JSON file ``path`` is rewritten after each verdict."""

    def __init__(self, path: Path, about: Mapping[str, Any]) -> None:
        self.path = path
        self.content: dict[str, Any] = {**about, "parts": {}}

    @classmethod
    def continue_or_start(cls, folder: Path, about: Mapping[str, Any]) -> Results:
        """Continue the newest results in ``folder`` of the same device, type, commit and sizes, or start new ones."""
        folder.mkdir(parents=True, exist_ok=True)
        compared_keys = ("device", "kind", "commit", "is_dry")
        for path in sorted(folder.glob("gpu-*.json"), reverse=True):
            content = json.loads(path.read_text(encoding="utf-8"))
            if all(content.get(key) == about[key] for key in compared_keys):
                results = cls(path, about)
                results.content = content
                return results
        device = re.sub(r"[^a-z0-9]+", "-", about["device"].lower()).strip("-")
        stem = f"gpu-{device}-{about['date']}"
        num_files = sum(1 for _ in folder.glob(f"{stem}*.json"))
        return cls(folder / (f"{stem}.json" if not num_files else f"{stem}-{num_files + 1}.json"), about)

    def add(self, part_name: str, case: str, verdict: Verdict) -> None:
        """Store a verdict, replacing an earlier one of the case."""
        self._part(part_name)["cases"][case] = asdict(verdict)
        self.save()

    def add_seconds(self, part_name: str, seconds: float) -> None:
        """Add ``seconds`` to the time of a part."""
        self._part(part_name)["seconds"] = round(self._part(part_name)["seconds"] + seconds, 1)
        self.save()

    def of(self, part_name: str) -> dict[str, Verdict]:
        """Return the verdicts of a part by case."""
        return {name: Verdict(**verdict) for name, verdict in self._part(part_name)["cases"].items()}

    def save(self) -> None:
        """Write the file atomically: the previous version remains until the new one is complete."""
        temporary = self.path.with_suffix(".tmp")
        temporary.write_text(json.dumps(self.content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        os.replace(temporary, self.path)

    def _part(self, name: str) -> dict[str, Any]:
        return self.content["parts"].setdefault(name, {"seconds": 0.0, "cases": {}})


class Skip(Exception):
    """A case cannot run on this machine; the message has the reason."""


@dataclass(frozen=True)
class Case:
    """A single check.

    Args:
        run: called with the machine and an empty folder; returns one line of text and figures. It raises AssertionError
            if the result is wrong, ``Skip`` if the machine cannot run the case, and other errors if the case is
            broken.
        limit_s: seconds after which commands of the case are killed.
        is_exclusive: run exclusively, because time or memory is measured.
    """

    name: str
    run: Callable[[Machine, Path], tuple[str, dict[str, Any]]]
    limit_s: float = 120.0
    is_exclusive: bool = False


@dataclass(frozen=True)
class Part:
    """Related cases, the most important first.

    Args:
        cases: function that creates the cases for a machine.
        budget_s: seconds after which all commands are killed; no case starts in the last eighth of this time. Time that
            earlier parts did not use is added.
        num_concurrent: number of cases that may run at the same time.
        always_runs: run its cases at each start, because they present the results of the other parts.
    """

    name: str
    description: str
    cases: Callable[[Machine], Sequence[Case]]
    budget_s: float = 300.0
    num_concurrent: int = 1
    always_runs: bool = False


@dataclass
class Machine:
    """The device under test, and the state shared by cases.

    Args:
        device_type: "cuda", or "cpu" in a dry run.
        is_dry: toy sizes to test the benchmark itself; the figures have no meaning.
        work: folder for the files of cases.
        out: folder of the JSON file, the tables and the archive of logs.
        logs: folder of the output of the commands; ``run_part`` passes each case a subfolder.
        references: folder of CPU runs that were computed beforehand (``benchmarks.gpu.references``).
        deadline: time on ``time.monotonic()`` by which all commands must have ended.
        limit_factor: factor of the time limits of all cases, larger than 1 on a machine that is busy with other work.
    """

    device_type: str
    name: str
    is_dry: bool
    num_devices: int
    memory_bytes: int
    num_cores: int
    work: Path
    out: Path
    deadline: float = float("inf")
    limit_factor: float = 1.0
    results: Results | None = None
    logs: Path | None = None
    references: Path | None = None
    _shared: dict[str, Any] = field(default_factory=dict)
    _locks: dict[str, threading.Lock] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def compute_once(self, key: str, make: Callable[[], Any]) -> Any:
        """Return the result of the first call of ``make`` for ``key``; a second caller waits for the first."""
        with self._lock:
            lock = self._locks.setdefault(key, threading.Lock())
        with lock:
            if key not in self._shared:
                self._shared[key] = make()
            return self._shared[key]


def run_part(
    test_part: Part,
    machine: Machine,
    results: Results,
    *,
    repeated_statuses: Container[str] = (),
    only: Sequence[str] = (),
    skip: Sequence[str] = (),
    known_only: bool = False,
    print_line: Callable[[str], None] = print,
) -> None:
    """Run the cases of a part that have no final verdict yet, and print a line for each.

    Args:
        repeated_statuses: statuses, such as FAILED, whose cases are repeated although they are final.
        only: run only cases whose names contain one of these texts; empty: all. Parts with ``always_runs`` run all
            their cases.
        skip: do not run cases whose names contain one of these texts.
        known_only: do not run cases that have no verdict yet.
    """
    start, known = time.monotonic(), results.of(test_part.name)
    cases = [
        case
        for case in test_part.cases(machine)
        if test_part.always_runs or is_selected(case.name, only=only, skip=skip)
    ]
    final = () if test_part.always_runs else [status for status in FINAL if status not in repeated_statuses]
    to_do = [case for case in cases if case.name not in known or known[case.name].status not in final]
    if known_only and not test_part.always_runs:
        to_do = [case for case in to_do if case.name in known]
    print_line(f"== {test_part.name}: {test_part.description} ({len(to_do)} of {len(cases)} cases to run)")
    start_window = (start + test_part.budget_s * (1 - _NO_START_FRACTION), start + test_part.budget_s)
    gate = _Gate()

    def run_case(case: Case) -> None:
        with gate.exclusive() if case.is_exclusive else gate.shared():
            verdict = _judge(case, machine, test_part, *start_window)
        with gate.printing:
            results.add(test_part.name, case.name, verdict)
            if machine.logs is not None and verdict.status in logs.ARCHIVED:
                logs.write_archive(machine.logs, results)
            print_line(f"{verdict.status:8} {test_part.name}: {case.name} ({verdict.seconds:.1f} s): {verdict.text}")

    with ThreadPoolExecutor(test_part.num_concurrent) as pool:
        for future in [pool.submit(run_case, case) for case in to_do]:
            future.result()
    results.add_seconds(test_part.name, time.monotonic() - start)


def is_selected(name: str, *, only: Sequence[str], skip: Sequence[str]) -> bool:
    """Return True if ``name`` contains a text of ``only`` (or that is empty), and contains no text of ``skip``."""
    return (not only or any(text in name for text in only)) and not any(text in name for text in skip)


def _judge(case: Case, machine: Machine, test_part: Part, latest: float, end: float) -> Verdict:
    """Run a case and return its verdict.

    Args:
        latest: time after which the case does not start, on ``time.monotonic()``.
        end: time at which its commands are killed.
    """
    start = time.monotonic()
    if start >= latest:
        return Verdict(NOT_RUN, f"not started within the part's {test_part.budget_s:.0f} s; the next start runs it")
    folder = machine.work / test_part.name / logs.folder_name(case.name)
    folder.mkdir(parents=True, exist_ok=True)
    case_logs = None if machine.logs is None else logs.start_case(machine.logs, test_part.name, case.name)
    case_end = start + case.limit_s * machine.limit_factor
    try:
        text, figures = case.run(replace(machine, deadline=min(case_end, end), logs=case_logs), folder)
        verdict = Verdict(PASSED, text, figures)
    except Skip as skip:
        verdict = Verdict(SKIPPED, str(skip))
    except AssertionError as error:
        verdict = Verdict(FAILED, _join_lines(str(error) or "".join(traceback.format_tb(error.__traceback__)[-1:])))
    except Exception as error:
        if case_logs is not None:
            (case_logs / "traceback.log").write_text(traceback.format_exc(), encoding="utf-8")
        verdict = Verdict(FAILED, _join_lines(f"{type(error).__name__}: {error}"))
    now = time.monotonic()
    if verdict.status == FAILED and end < case_end and now >= end:  # it may have failed only for lack of time
        reason = (
            f"killed at the end of the part's {test_part.budget_s:.0f} s; the next start repeats it: {verdict.text}"
        )
        verdict = Verdict(NOT_RUN, reason)
    return replace(verdict, seconds=round(now - start, 2))


_NO_START_FRACTION = 1 / 8
"""Fraction of a part's time, at its end, in which no case starts, because it could not finish."""


def _join_lines(text: str) -> str:
    """Join the lines of ``text``, and keep only the last 1,500 characters."""
    line = " | ".join(text_line.strip() for text_line in text.splitlines() if text_line.strip())
    return line if len(line) <= 1500 else "... " + line[-1500:]


class _Gate:
    """Lock that cases hold together (``shared``) or exclusively (``exclusive``), like a readers-writer lock."""

    def __init__(self) -> None:
        self._condition, self._inside, self._is_closed = threading.Condition(), 0, False
        self.printing = threading.Lock()

    @contextmanager
    def shared(self) -> Iterator[None]:
        with self._condition:
            self._condition.wait_for(lambda: not self._is_closed)
            self._inside += 1
        try:
            yield
        finally:
            with self._condition:
                self._inside -= 1
                self._condition.notify_all()

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        with self._condition:
            self._condition.wait_for(lambda: not self._is_closed)
            self._is_closed = True
            self._condition.wait_for(lambda: not self._inside)
        try:
            yield
        finally:
            with self._condition:
                self._is_closed = False
                self._condition.notify_all()


# Commands of cases: training scripts and tools in separate processes with a time limit and captured output.

ROOT = Path(__file__).resolve().parents[2]
TIMED_OUT = -1
_MAX_COMMAND_S = 86400.0
RUN_TIED_TO_PARENT = (
    f"import ctypes, os, sys; ctypes.CDLL(None).prctl(1, {signal.SIGKILL:d}, 0, 0, 0); "  # PR_SET_PDEATHSIG
    "os.execvp(sys.argv[1], sys.argv[1:])"
)
"""Python program that executes the following words as a command, which is killed if the starting thread ends.

The signal is requested in a new process, because a process with threads and a GPU context must not run Python code
after a fork.
"""


@dataclass(frozen=True)
class CompletedCommand:
    """A command that has ended.

    Args:
        code: exit code; TIMED_OUT if it was killed after the limit.
        text: its output, including stderr.
    """

    code: int
    text: str
    seconds: float

    def check(self, code: int = 0) -> CompletedCommand:
        """Check that the command ended with ``code``, and return this object.

        Raises:
            AssertionError: it ended with another code; the message has its last lines.
        """
        if self.code != code:
            ended = "did not end in time" if self.code == TIMED_OUT else f"ended with code {self.code}, not {code}"
            raise AssertionError(f"{ended}: {self.text[-1200:]}")
        return self


def environment(machine: Machine, extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return this process's environment without variables of ranks, and with the project in PYTHONPATH."""
    removed = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "DS_ACCELERATOR")
    env = {name: value for name, value in os.environ.items() if name not in removed}
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    env.setdefault("MEGATRON_PROVE", "0")  # runs on the CPU are compared with others, and timed
    env["PYTHONUNBUFFERED"] = "1"
    if machine.device_type == "cpu":
        env |= {"DS_ACCELERATOR": "cpu"}
    return env | {"OMP_NUM_THREADS": "1"} | dict(extra or {})


def tie_to_parent(words: Sequence[str]) -> list[str]:
    """Return a command that runs ``words`` and is killed if the thread that starts it ends."""
    return [sys.executable, "-I", "-S", "-c", RUN_TIED_TO_PARENT, *words]


def start_command(
    machine: Machine, words: Sequence[str], output: int | IO[str], env: Mapping[str, str] | None, cwd: Path = ROOT
) -> subprocess.Popen[str]:
    """Start ``words`` in a separate process group, so that one signal ends all its processes.

    The processes die with the thread that starts them, so that a killed benchmark leaves nothing on the device.
    """
    return subprocess.Popen(
        tie_to_parent(words),
        cwd=cwd,
        env=environment(machine, env),
        stdout=output,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )


def run_command(
    machine: Machine, words: Sequence[str], env: Mapping[str, str] | None = None, cwd: Path = ROOT
) -> CompletedCommand:
    """Run ``words`` until the command ends or the time of the case is over; no process remains afterwards."""
    start = time.monotonic()
    with open_log(machine, words) as log:
        first = log.tell()
        process = start_command(machine, words, log, env, cwd)
        try:
            code = process.wait(min(max(1.0, machine.deadline - start), _MAX_COMMAND_S))
        except subprocess.TimeoutExpired:
            code = TIMED_OUT
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        log.seek(first)
        return CompletedCommand(code, log.read(), time.monotonic() - start)


def open_log(machine: Machine, words: Sequence[str]) -> IO[str]:
    """Return a new file for the output of a command, which begins with the command; temporary without ``logs``."""
    if machine.logs is not None:
        file = logs.open_new(machine.logs)
    else:
        file = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115 - the caller closes it
    file.write(f"$ {shlex.join(words)}\n")
    file.flush()
    return file


def run_python(
    machine: Machine, *words: str, env: Mapping[str, str] | None = None, cwd: Path = ROOT
) -> CompletedCommand:
    """Run this Python with ``words``."""
    return run_command(machine, [sys.executable, *words], env, cwd)
