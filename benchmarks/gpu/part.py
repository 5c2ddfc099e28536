"""Parts of the GPU benchmark: named cases that run one or several at a time within a time budget and end in a verdict.

The verdicts are saved in one JSON file, ``gpu-<device>-<date>.json``, so that a second start can continue:

    {"device": "NVIDIA H200", "kind": "cuda", "date": "2026-11-24", "commit": "...", "versions": {...}, "is_dry": false,
     "parts": {"train": {"seconds": 61.2, "cases": {"gpt2 bf16": {"status": "passed", "text": "...", "figures": {...},
     "seconds": 8.1}}}}}
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import IO, Any

PASSED, FAILED, SKIPPED, NOT_RUN = "passed", "failed", "skipped", "not run"
FINAL = (PASSED, FAILED, SKIPPED)
"""Verdicts that a second start does not repeat."""


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
    def begin_or_go_on(cls, folder: Path, about: Mapping[str, Any]) -> Results:
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

    def add(self, part: str, case: str, verdict: Verdict) -> None:
        """Store a verdict, replacing an earlier one of the case."""
        self._part(part)["cases"][case] = asdict(verdict)
        self.save()

    def add_seconds(self, part: str, seconds: float) -> None:
        """Add ``seconds`` to the time of a part."""
        self._part(part)["seconds"] = round(self._part(part)["seconds"] + seconds, 1)
        self.save()

    def of(self, part: str) -> dict[str, Verdict]:
        """Return the verdicts of a part by case."""
        return {name: Verdict(**verdict) for name, verdict in self._part(part)["cases"].items()}

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
        alone: run exclusively, because time or memory is measured.
    """

    name: str
    run: Callable[[Machine, Path], tuple[str, dict[str, Any]]]
    limit_s: float = 120.0
    alone: bool = False


@dataclass(frozen=True)
class Part:
    """Related cases, the most important first.

    Args:
        cases: function that creates the cases for a machine.
        budget_s: seconds after which all commands are killed; no case starts in the last eighth of this time. Time that
            earlier parts did not use is added.
        at_once: number of cases that may run at the same time.
        is_always: run its cases at each start, because they present the results of the other parts.
    """

    name: str
    about: str
    cases: Callable[[Machine], Sequence[Case]]
    budget_s: float = 300.0
    at_once: int = 1
    is_always: bool = False


@dataclass
class Machine:
    """The device under test, and the state shared by cases.

    Args:
        kind: "cuda", or "cpu" in a dry run.
        is_dry: toy sizes to test the benchmark itself; the figures have no meaning.
        work: folder for the files of cases.
        out: folder of the JSON file and the tables.
        end: time on ``time.monotonic()`` by which all commands must have ended.
    """

    kind: str
    name: str
    is_dry: bool
    num_devices: int
    memory_bytes: int
    num_cores: int
    work: Path
    out: Path
    end: float = float("inf")
    results: Results | None = None
    _shared: dict[str, Any] = field(default_factory=dict)
    _locks: dict[str, threading.Lock] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def once(self, key: str, make: Callable[[], Any]) -> Any:
        """Return the result of the first call of ``make`` for ``key``; a second caller waits for the first."""
        with self._lock:
            lock = self._locks.setdefault(key, threading.Lock())
        with lock:
            if key not in self._shared:
                self._shared[key] = make()
            return self._shared[key]


def run_part(
    part: Part,
    machine: Machine,
    results: Results,
    *,
    again: Container[str] = (),
    only: str = "",
    say: Callable[[str], None] = print,
) -> None:
    """Run the cases of a part that have no final verdict yet, and print a line for each.

    Args:
        again: statuses, such as FAILED, whose cases are repeated although they are final.
        only: run only cases whose names contain this text; parts with ``is_always`` run all their cases.
    """
    start, known = time.monotonic(), results.of(part.name)
    cases = [case for case in part.cases(machine) if part.is_always or only in case.name]
    final = () if part.is_always else [status for status in FINAL if status not in again]
    to_do = [case for case in cases if case.name not in known or known[case.name].status not in final]
    say(f"== {part.name}: {part.about} ({len(to_do)} of {len(cases)} cases to run)")
    start_window = (start + part.budget_s * (1 - _NONE_BEGINS), start + part.budget_s)
    gate = _Gate()

    def take(case: Case) -> None:
        with gate.alone() if case.alone else gate.beside():
            verdict = _judge(case, machine, part, *start_window)
        with gate.printing:
            results.add(part.name, case.name, verdict)
            say(f"{verdict.status:8} {part.name}: {case.name} ({verdict.seconds:.1f} s): {verdict.text}")

    with ThreadPoolExecutor(part.at_once) as pool:
        for future in [pool.submit(take, case) for case in to_do]:
            future.result()
    results.add_seconds(part.name, time.monotonic() - start)


def _judge(case: Case, machine: Machine, part: Part, latest: float, end: float) -> Verdict:
    """Run a case and return its verdict.

    Args:
        latest: time after which the case does not start, on ``time.monotonic()``.
        end: time at which its commands are killed.
    """
    start = time.monotonic()
    if start >= latest:
        return Verdict(NOT_RUN, f"not started within the part's {part.budget_s:.0f} s; the next start runs it")
    folder = machine.work / part.name / "".join(c if c.isalnum() else "-" for c in case.name)
    folder.mkdir(parents=True, exist_ok=True)
    own_end = start + case.limit_s
    try:
        text, figures = case.run(replace(machine, end=min(own_end, end)), folder)
        verdict = Verdict(PASSED, text, figures)
    except Skip as skip:
        verdict = Verdict(SKIPPED, str(skip))
    except AssertionError as error:
        verdict = Verdict(FAILED, _line(str(error) or "".join(traceback.format_tb(error.__traceback__)[-1:])))
    except Exception as error:
        (folder / "traceback").write_text(traceback.format_exc(), encoding="utf-8")
        verdict = Verdict(FAILED, _line(f"{type(error).__name__}: {error}"))
    now = time.monotonic()
    if verdict.status == FAILED and end < own_end and now >= end:  # it may have failed only for lack of time
        why = f"killed at the end of the part's {part.budget_s:.0f} s; the next start repeats it: {verdict.text}"
        verdict = Verdict(NOT_RUN, why)
    return replace(verdict, seconds=round(now - start, 2))


_NONE_BEGINS = 1 / 8
"""Fraction of a part's time, at its end, in which no case starts, because it could not finish."""


def _line(text: str) -> str:
    """Join the lines of ``text``, and keep only the last 1,500 characters."""
    line = " | ".join(part.strip() for part in text.splitlines() if part.strip())
    return line if len(line) <= 1500 else "... " + line[-1500:]


class _Gate:
    """Lock that cases hold together (``beside``) or exclusively (``alone``), like a readers-writer lock."""

    def __init__(self) -> None:
        self._condition, self._inside, self._is_closed = threading.Condition(), 0, False
        self.printing = threading.Lock()

    @contextmanager
    def beside(self) -> Iterator[None]:
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
    def alone(self) -> Iterator[None]:
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
_LONGEST_S = 86400.0
_TIED = (
    f"import ctypes, os, sys; ctypes.CDLL(None).prctl(1, {signal.SIGKILL:d}, 0, 0, 0); "  # PR_SET_PDEATHSIG
    "os.execvp(sys.argv[1], sys.argv[1:])"
)
"""Python program that executes the following words as a command, which is killed if the starting thread ends.

The request for this signal needs a new process: a program with threads and a GPU must not fork to make it itself.
"""


@dataclass(frozen=True)
class Done:
    """A command that has ended.

    Args:
        code: exit code; TIMED_OUT if it was killed after the limit.
        text: its output, including stderr.
    """

    code: int
    text: str
    seconds: float

    def check(self, code: int = 0) -> Done:
        """Check that the command ended with ``code``, and return this object.

        Raises:
            AssertionError: it ended with another code; the message has its last lines.
        """
        if self.code != code:
            ended = "did not end in time" if self.code == TIMED_OUT else f"ended with code {self.code}, not {code}"
            raise AssertionError(f"{ended}: {self.text[-1200:]}")
        return self


def environment(machine: Machine, more: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return this process's environment without variables of ranks, and with the project in PYTHONPATH."""
    left_out = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "DS_ACCELERATOR")
    env = {name: value for name, value in os.environ.items() if name not in left_out}
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    env["PYTHONUNBUFFERED"] = "1"
    if machine.kind == "cpu":
        env |= {"DS_ACCELERATOR": "cpu"}
    return env | {"OMP_NUM_THREADS": "1"} | dict(more or {})


def started(
    machine: Machine, words: Sequence[str], output: int | IO[str], env: Mapping[str, str] | None, cwd: Path = ROOT
) -> subprocess.Popen[str]:
    """Start ``words`` in a separate process group, so that one signal ends all its processes.

    The processes die with the thread that starts them, so that a killed benchmark leaves nothing on the device.
    """
    return subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", _TIED, *words],
        cwd=cwd,
        env=environment(machine, env),
        stdout=output,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )


def command(machine: Machine, words: Sequence[str], env: Mapping[str, str] | None = None, cwd: Path = ROOT) -> Done:
    """Run ``words`` until the command ends or the time of the case is over; no process remains afterwards."""
    start = time.monotonic()
    process = started(machine, words, subprocess.PIPE, env, cwd)
    try:
        text, _ = process.communicate(timeout=min(max(1.0, machine.end - start), _LONGEST_S))
        code = process.returncode
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        text, _ = process.communicate()
        code = TIMED_OUT
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return Done(code, text, time.monotonic() - start)


def python(machine: Machine, *words: str, env: Mapping[str, str] | None = None, cwd: Path = ROOT) -> Done:
    """Run this Python with ``words``."""
    return command(machine, [sys.executable, *words], env, cwd)
