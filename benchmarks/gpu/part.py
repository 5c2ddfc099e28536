"""What a part is: named cases, run one or several at a time within a time budget, each ending in a verdict."""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable, Container, Iterator, Sequence
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
        budget_s: after so much time all is ended, and in the last eighth of it no case begins; more where the parts
            before have left some.
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
    again: Container[str] = (),
    only: str = "",
    say: Callable[[str], None] = print,
) -> None:
    """Run the cases of a part that have no final verdict yet, and print a line for each.

    Args:
        again: final verdicts that are repeated, too.
        only: run only cases whose names contain this, and those that are run at each start.
    """
    start, known = time.monotonic(), results.of(part.name)
    cases = [case for case in part.cases(machine) if part.is_always or only in case.name]
    kept = () if part.is_always else [status for status in FINAL if status not in again]
    to_do = [case for case in cases if case.name not in known or known[case.name].status not in kept]
    say(f"== {part.name}: {part.about} ({len(to_do)} of {len(cases)} cases to run)")
    window = (start + part.budget_s * (1 - _NONE_BEGINS), start + part.budget_s)
    gate = _Gate()

    def take(case: Case) -> None:
        with gate.alone() if case.alone else gate.beside():
            verdict = _judge(case, machine, part, *window)
        with gate.printing:
            results.add(part.name, case.name, verdict)
            say(f"{verdict.status:8} {part.name}: {case.name} ({verdict.seconds:.1f} s): {verdict.text}")

    with ThreadPoolExecutor(part.at_once) as pool:
        for done in [pool.submit(take, case) for case in to_do]:
            done.result()
    results.add_seconds(part.name, time.monotonic() - start)


def _judge(case: Case, machine: Machine, part: Part, latest: float, end: float) -> Verdict:
    """Run a case that may begin until ``latest``, and whose commands end at ``end``."""
    start = time.monotonic()
    if start >= latest:
        return Verdict(NOT_RUN, f"the part's {part.budget_s:.0f} s were over; a second start goes on here")
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
    if verdict.status == FAILED and end < own_end and now >= end:  # it may have failed for lack of time alone
        why = f"cut off when the part's {part.budget_s:.0f} s were over; a second start repeats it: {verdict.text}"
        verdict = Verdict(NOT_RUN, why)
    return replace(verdict, seconds=round(now - start, 2))


_NONE_BEGINS = 1 / 8
"""Of a part's time, the last: what began then would be cut off."""


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
