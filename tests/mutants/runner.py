"""Run tests with one mutant applied, each in a fork of one process that has imported torch and the package.

Importing torch, DeepSpeed and the package takes longer than most selections of tests. The process started by this file
as a script imports them once and forks for each request. It reads one JSON object per line from standard input,
``{"mutant": name or null, "tests": [...], "log": path, "deadline_s": seconds}``, and answers each with the exit code of
pytest (-1 after the deadline).

By hand, for one mutant or for all whose names contain a text::

    python -m tests.mutants.runner optim.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 100.0
TIMED_OUT = -1
PR_SET_PDEATHSIG = 1  # of prctl(2)
ALL_SKIPPED = re.compile(r"^s+ +\[100%\]$", re.MULTILINE)
RAISED = re.compile(r"^E +(?:\w+\.)*(\w+(?:Error|Exception))\b", re.MULTILINE)


class Outcome(NamedTuple):
    """Exit code of pytest (0: all passed, 1: some failed) and its output."""

    code: int
    text: str

    @property
    def is_skipped(self) -> bool:
        return self.code == 0 and ALL_SKIPPED.search(self.text) is not None

    @property
    def raised(self) -> set[str]:
        """Names of the exceptions that failed tests."""
        return set(RAISED.findall(self.text))


class Runner:
    """Starts the importing process; leaving the ``with`` block ends it."""

    def __init__(self, folder: Path) -> None:
        self._log = folder / "log"
        self._server = _start_server()

    def __enter__(self) -> Runner:
        return self

    def __exit__(self, *error: object) -> None:
        self._server.communicate()  # closes its standard input, which ends it

    def run(self, tests: tuple[str, ...], mutant: str | None = None, deadline_s: float = DEADLINE_S) -> Outcome:
        """Run ``tests`` with the mutant of that name applied, or with none."""
        assert self._server.stdin is not None and self._server.stdout is not None
        request = {"mutant": mutant, "tests": tests, "log": str(self._log), "deadline_s": deadline_s}
        try:
            self._server.stdin.write(json.dumps(request) + "\n")
            self._server.stdin.flush()
            code = int(self._server.stdout.readline())
        except BaseException:  # the pending answer must not be read as the answer to the next request
            self._server.kill()
            self._server.wait()
            self._server = _start_server()
            raise
        return Outcome(code, self._log.read_text(errors="replace"))


def _start_server() -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "tests.mutants.runner", "--serve"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "DS_ACCELERATOR": "cpu",
            "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        },
    )


def serve() -> None:
    """Import torch and the package, then fork for each line of standard input."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # DeepSpeed prints while it is imported
    import hypothesis  # noqa: F401 - otherwise pytest would rewrite its asserts in each child
    import pytest  # noqa: F401
    import torch._dynamo
    import torch._inductor.codecache

    torch.set_num_threads(1)
    import deepspeed.pipe  # noqa: F401

    from tests.mutants.mutant import find_target, load_mutants

    for mutant in load_mutants().values():
        if mutant.can_be_applied:
            find_target(mutant.target)
    gc.freeze()  # keeps the collector of the children from touching, and so copying, the parent's pages
    for line in sys.stdin:
        answers.write(f"{_run_in_fork(json.loads(line))}\n")
        answers.flush()


def _run_in_fork(request: dict[str, Any]) -> int:
    child = os.fork()
    if not child:
        _run_pytest_and_exit(request)
    deadline = time.monotonic() + request["deadline_s"]
    while time.monotonic() < deadline:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.killpg(child, 9)
    os.waitpid(child, 0)
    return TIMED_OUT


def _run_pytest_and_exit(request: dict[str, Any]) -> None:
    """Apply the mutant, run pytest and exit; in its own session, so that the deadline ends all its children too."""
    import pytest

    from tests.mutants.mutant import MUTANTS, apply_mutant

    code = 99
    try:
        os.setsid()
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, 9)  # a killed server takes its pytest along
        log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
        if request["mutant"] is not None:
            apply_mutant(MUTANTS[request["mutant"]])
        flags = ["-x", "-q", "--tb=short", "-p", "no:cacheprovider", "--all"]
        flags.append("--hypothesis-seed=0")  # with --all examples are new in each run: some would not detect the mutant
        code = int(pytest.main([*flags, *request["tests"]]))
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def explain_survival(mutant: Any, outcome: Outcome) -> str | None:
    """Return why the outcome does not show that the tests detect ``mutant``; None if they do."""
    if outcome.code != 1:
        return f"pytest ended with {outcome.code}, not with 1 (a failed test)"
    if not mutant.raises and not outcome.raised <= {"AssertionError"}:
        return f"{', '.join(sorted(outcome.raised))} was raised where an assertion must fail"
    return None


def main(name_filter: str) -> None:
    import tempfile

    from tests.mutants.mutant import load_mutants

    survivors = 0
    with tempfile.TemporaryDirectory() as folder, Runner(Path(folder)) as runner:
        for name, mutant in load_mutants().items():
            if name_filter not in name:
                continue
            if not mutant.can_be_applied:
                print(f"         {name}: {mutant.needs} is not installed", flush=True)
                continue
            start = time.monotonic()
            outcome = runner.run(mutant.tests, name)
            reason = "skipped here" if outcome.is_skipped else explain_survival(mutant, outcome)
            survivors += reason is not None
            print(f"{time.monotonic() - start:6.1f} s  {name}: {reason or 'killed'}", flush=True)
            if reason is not None:
                print(outcome.text[-2000:])
    sys.exit(min(survivors, 1))


if __name__ == "__main__":
    if sys.argv[1:] == ["--serve"]:
        serve()
    else:
        main(sys.argv[1] if len(sys.argv) > 1 else "")
