"""Run the commands of a section with a time limit, write their output to files, and kill all remaining processes."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from megatron.child_process import die_with_parent

ROOT = Path(__file__).absolute().parents[2]  # not resolved: the folders of a checkout may be links
POLL_S = 0.1
TERMINATE_S = 0.5
KILL_S = 10.0
_PR_SET_CHILD_SUBREAPER = 36
_KEPT_VARIABLES = {"MEGATRON_VENV", "MEGATRON_LOG_LEVEL"}
_RANK_VARIABLES = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_LIST", "LAUNCH_FLAGS", "program"}


class LimitError(Exception):
    """The commands did not end within their time limit."""


def adopt_orphans() -> None:
    """Make this process the parent of its descendants whose parents end, so that ``kill_descendants`` finds them.

    Only Linux supports this. Source: prctl(2), ``PR_SET_CHILD_SUBREAPER``.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def clean_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return ``environment`` without the variables that affect a run, so that its output does not depend on the user.

    The commands run on CPUs, because the time limits and the output in docs/tour.md are from CPUs.
    """
    script = (ROOT / "run_gpt2.sh").read_text(encoding="utf-8")
    variables = _RANK_VARIABLES | set(re.findall(r"^(\w+)=\$\{\1:-", script, flags=re.M))
    prefixes = ("MEGATRON_", "SLURM_", "TOUR_", "TORCHELASTIC_")
    return {
        name: value
        for name, value in environment.items()
        if name in _KEPT_VARIABLES or not (name in variables or name.startswith(prefixes))
    } | {"DS_ACCELERATOR": "cpu", "PYTHON": sys.executable}


def run_commands(
    commands: Sequence[str], logs: Sequence[Path], limit_s: float, on_wait: Callable[[Path], None]
) -> list[int]:
    """Run shell commands at the same time and return their exit codes (-N if signal N ended the command).

    All their processes are killed when this function returns or raises.

    Args:
        logs: file for the output of each command.
        limit_s: time limit in seconds.
        on_wait: called with the first file several times per second.

    Raises:
        LimitError: a command did not end in time.
    """
    deadline = time.monotonic() + limit_s
    environment = clean_environment(os.environ)
    processes = []
    try:
        for command, log in zip(commands, logs, strict=True):
            with log.open("wb") as file:
                processes.append(
                    subprocess.Popen(
                        ["bash", "-c", command], cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=file,
                        stderr=subprocess.STDOUT, start_new_session=True, preexec_fn=die_with_parent,
                    )
                )  # fmt: skip
        while any(process.poll() is None for process in processes):
            if time.monotonic() > deadline:
                raise LimitError(f"{limit_s:g} s")
            on_wait(logs[0])
            time.sleep(POLL_S)
        return [process.returncode for process in processes]
    finally:
        try:
            _terminate(processes)
        finally:
            kill_descendants()


def _terminate(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Send SIGTERM twice. At the second signal, a launcher exits immediately and removes its files."""
    for _ in range(2):
        for process in processes:
            process.terminate()
        deadline = time.monotonic() + TERMINATE_S
        while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
            time.sleep(0.01)


def kill_descendants() -> None:
    """Kill all descendants of this process and wait up to ``KILL_S`` until they have ended."""
    deadline = time.monotonic() + KILL_S
    while (pids := _descendants(os.getpid())) and time.monotonic() < deadline:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(0.01)


def _descendants(pid: int) -> list[int]:
    """List the descendants of process ``pid``; empty without /proc."""
    children = []
    with suppress(OSError):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            with suppress(OSError):
                children += [int(child) for child in (thread / "children").read_text().split()]
    return children + [descendant for child in children for descendant in _descendants(child)]
