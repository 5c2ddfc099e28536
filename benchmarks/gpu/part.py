"""What a part is: named cases, run one or several at a time within a time budget, each ending in a verdict."""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.gpu.results import FAILED, FINAL, NOT_RUN, PASSED, SKIPPED, Results, Verdict


class Skip(Exception):
    """A case cannot be done on this machine; the text says why."""


@dataclass(frozen=True)
class Case:
    """One thing to be shown.

    Args:
        run: gets the machine and an empty folder of its own; returns one line of text and figures. Raises
            AssertionError where what it saw is wrong, ``Skip`` where the machine lacks something, anything else
            where it broke.
        limit_s: commands of the case are ended after so long.
        alone: no other case runs beside it (its times or its memory count).
    """

    name: str
    run: Callable[[Machine, Path], tuple[str, dict[str, Any]]]
    limit_s: float = 120.0
    alone: bool = False


@dataclass(frozen=True)
class Part:
    """Cases that belong together, the most telling first.

    Args:
        cases: makes them for a machine.
        budget_s: no case begins once so much time has gone, in a start of all parts.
        at_once: cases that may run side by side.
        is_always: its cases run at each start, for they show what the others have found.
    """

    name: str
    about: str
    cases: Callable[[Machine], Sequence[Case]]
    budget_s: float = 300.0
    at_once: int = 1
    is_always: bool = False


@dataclass
class Machine:
    """The device under test, and what cases share.

    Args:
        kind: "cuda", or "cpu" in the dry form.
        is_dry: toy sizes, to show that the program works; the figures mean nothing.
        work: folder for the files of cases.
        out: folder of the JSON file and of pictures.
        end: on ``time.monotonic()``, when all commands must have ended.
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
        """Return what ``make`` returned when it was first called for ``key``; a second caller waits for the first."""
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
    again: bool = False,
    only: str = "",
    say: Callable[[str], None] = print,
) -> None:
    """Run the cases of a part that have no final verdict yet, and print a line for each.

    Args:
        again: repeat those that have one, too.
        only: run only cases whose names contain this.
    """
    start, known = time.monotonic(), results.of(part.name)
    cases = [case for case in part.cases(machine) if only in case.name]
    again = again or part.is_always
    to_do = [case for case in cases if again or case.name not in known or known[case.name].status not in FINAL]
    say(f"== {part.name}: {part.about} ({len(to_do)} of {len(cases)} cases to run)")
    machine.end = start + part.budget_s
    gate = _Gate()

    def take(case: Case) -> None:
        with gate.alone() if case.alone else gate.beside():
            verdict = _judge(case, machine, part)
        with gate.printing:
            results.add(part.name, case.name, verdict)
            say(f"{verdict.status:8} {part.name}: {case.name} ({verdict.seconds:.1f} s): {verdict.text}")

    with ThreadPoolExecutor(part.at_once) as pool:
        for done in [pool.submit(take, case) for case in to_do]:
            done.result()
    results.add_seconds(part.name, time.monotonic() - start)


def _judge(case: Case, machine: Machine, part: Part) -> Verdict:
    start = time.monotonic()
    if start >= machine.end:
        return Verdict(NOT_RUN, f"the part's {part.budget_s:.0f} s were over; a second start goes on here")
    folder = machine.work / part.name / "".join(c if c.isalnum() else "-" for c in case.name)
    folder.mkdir(parents=True, exist_ok=True)
    try:
        text, figures = case.run(replace_end(machine, start + case.limit_s), folder)
        verdict = Verdict(PASSED, text, figures)
    except Skip as skip:
        verdict = Verdict(SKIPPED, str(skip))
    except AssertionError as error:
        verdict = Verdict(FAILED, _line(str(error) or "".join(traceback.format_tb(error.__traceback__)[-1:])))
    except Exception as error:
        (folder / "traceback").write_text(traceback.format_exc(), encoding="utf-8")
        verdict = Verdict(FAILED, _line(f"{type(error).__name__}: {error}"))
    return replace(verdict, seconds=round(time.monotonic() - start, 2))


def replace_end(machine: Machine, end: float) -> Machine:
    """Return a view of ``machine`` whose commands end earlier; what is shared stays shared."""
    return replace(machine, end=min(machine.end + _GRACE_S, end))


_GRACE_S = 60.0
"""That a case which began within the budget may take beyond it."""


def _line(text: str) -> str:
    """Return ``text`` as one line of at most 1,500 characters, its end kept."""
    line = " | ".join(part.strip() for part in text.splitlines() if part.strip())
    return line if len(line) <= 1500 else "... " + line[-1500:]


class _Gate:
    """Lets cases run beside each other, or one alone."""

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
