"""Commands of cases: training scripts and tools in processes of their own, ended in time, with what they wrote."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from benchmarks.gpu.part import Machine

ROOT = Path(__file__).resolve().parents[2]
TIMED_OUT = -1
_LONGEST_S = 86400.0
_TIED = (
    f"import ctypes, os, sys; ctypes.CDLL(None).prctl(1, {signal.SIGKILL:d}, 0, 0, 0); "  # PR_SET_PDEATHSIG
    "os.execvp(sys.argv[1], sys.argv[1:])"
)
"""Becomes the command that follows, which dies with the thread that started it. A program with threads and a GPU should
not fork to say so itself."""


@dataclass(frozen=True)
class Done:
    """A command that has ended.

    Args:
        code: exit code; TIMED_OUT where it had to be ended.
        text: what it wrote, standard error included.
    """

    code: int
    text: str
    seconds: float

    def check(self, code: int = 0) -> Done:
        """Return itself.

        Raises:
            AssertionError: it ended with another code; with its last lines.
        """
        if self.code != code:
            ended = "did not end in time" if self.code == TIMED_OUT else f"ended with code {self.code}, not {code}"
            raise AssertionError(f"{ended}: {self.text[-1200:]}")
        return self


def environment(machine: Machine, more: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the environment of a command: no rank variables of another job, the project first on the path."""
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
    """Start ``words`` in a process group of their own, which a signal can end as a whole.

    They die with the thread that starts them, so that a program which is killed leaves nothing on the device.
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
    """Run ``words`` until they end or the case's time is over; nothing of them is left then."""
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
