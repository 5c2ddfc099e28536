"""Starting, signalling and reaping ranks."""

from __future__ import annotations

import atexit
import os
import runpy
import select
import signal
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from types import FrameType, TracebackType

from megatron import log
from megatron.child_process import die_with_parent
from megatron.runtime.exit_signals import is_same_press

# Starting, signalling and reaping the processes of one node.
#
# Each rank leads its own session and process group: a Ctrl-C in the terminal reaches the launcher alone, which forwards
# it once, and what a rank has started (data workers) is ended with it. A rank dies with the launcher
# (PR_SET_PDEATHSIG).

HANDLED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGCHLD)
"""What the launcher has handlers for."""


class RankProcess:
    """One rank that has been started: its numbers, and how it ended."""

    def __init__(self, rank: int, local_rank: int, pid: int) -> None:
        self.rank, self.local_rank, self.pid = rank, local_rank, pid
        self.status: int | None = None
        self.ended_at = 0.0

    @property
    def is_alive(self) -> bool:
        return self.status is None

    def reap(self) -> bool:
        """Whether it has ended just now; what it had started is ended with it."""
        if not self.is_alive or os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            return False
        self.ended_at = time.monotonic()
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)  # before waitpid: until then nobody else can have this number
        self.status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return True

    def terminate(self) -> None:
        """Ask it to leave; only the rank itself, since its data workers must live while it saves."""
        if self.is_alive:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGTERM)

    def kill(self) -> None:
        """End it and what it has started, at once."""
        if self.is_alive:
            with suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)


class Gate:
    """Holds the forked ranks of one start back until the last of them is there.

    A rank that runs connects to the store, and the store's thread in the launcher then asks glibc for the name of the
    other end, under a lock of glibc's. A rank that is forked at that moment has this lock for ever, and hangs.
    """

    def __init__(self) -> None:
        self._inside, self._outside = os.pipe()

    def open(self) -> None:
        """Let all go on; in the launcher."""
        os.close(self._outside)
        os.close(self._inside)

    def wait(self) -> None:
        """Return when the launcher has opened the gate; in a rank."""
        os.close(self._outside)
        os.read(self._inside, 1)
        os.close(self._inside)


def start(
    script: str,
    arguments: Sequence[str],
    env: Mapping[str, str],
    *,
    in_fork: bool,
    keeps_input: bool = False,
    gate: Gate | None = None,
) -> int:
    """Start one rank and return its process id.

    Args:
        in_fork: run the script in a fork of this process, with the modules that are imported already; else in a
            fresh Python.
        keeps_input: leave it the launcher's standard input; else it has none.
        gate: a rank in a fork waits there before it does anything.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    launcher = os.getpid()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, HANDLED)  # else the rank's copy of our handler would swallow one
    pid = os.fork()
    if pid:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return pid
    try:
        _become_rank(launcher, keeps_input)
        if in_fork:
            if gate is not None:
                gate.wait()
            os.environ.clear()
            os.environ.update(env)
            _close_inherited()
            _run_and_leave(script, arguments)
        os.execve(sys.executable, [sys.executable, *_python_flags(), script, *arguments], dict(env))
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


def _become_rank(launcher: int, keeps_input: bool) -> None:
    os.setsid()
    die_with_parent()
    if os.getppid() != launcher:  # it died before the line above
        os._exit(1)
    signal.set_wakeup_fd(-1)
    for number in HANDLED:
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # SLURM may warn all processes; one that can save listens later
    signal.pthread_sigmask(signal.SIG_UNBLOCK, HANDLED)
    if not keeps_input:
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.close(null)


def _python_flags() -> list[str]:
    """Return the flags of this Python that change how a script runs."""
    return (["-O"] * sys.flags.optimize) + (["-B"] if sys.flags.dont_write_bytecode else [])


def _close_inherited() -> None:
    """Close the launcher's sockets and files, which a fresh Python would not have.

    Their numbers stay taken, by the null device: an object of the launcher that is collected here closes its number,
    and would close what this rank had opened under it (gloo's epoll, a checkpoint) if the number were free.
    """
    null = os.open(os.devnull, os.O_RDWR)
    for name in os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else ():
        number = int(name)
        if number > 2 and number != null and _is_open(number):
            os.dup2(null, number, inheritable=False)
    os.close(null)


def _is_open(number: int) -> bool:
    try:
        os.fstat(number)
    except OSError:
        return False
    return True


def _run_and_leave(script: str, arguments: Sequence[str]) -> None:
    """Run ``script`` as ``__main__`` and end this process as Python would."""
    sys.argv = [script, *arguments]
    sys.path[0] = os.path.dirname(os.path.abspath(script))
    code = 1
    try:
        runpy.run_path(script, run_name="__main__")
        code = 0
    except SystemExit as stop:
        code = _code_of(stop)
    except BaseException as error:
        sys.excepthook(type(error), error, _below_launcher(error.__traceback__, script))
    finally:
        with suppress(BaseException):
            threading._shutdown()  # type: ignore[attr-defined]
            atexit._run_exitfuncs()
        with suppress(BaseException):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code & 0xFF)


def _code_of(stop: SystemExit) -> int:
    if stop.code is None:
        return 0
    if isinstance(stop.code, int):
        return stop.code
    sys.stderr.write(f"{stop.code}\n")
    return 1


def _below_launcher(trace: TracebackType | None, script: str) -> TracebackType | None:
    """Return the part of a traceback that begins in the script."""
    part = trace
    while part is not None and part.tb_frame.f_code.co_filename != script:
        part = part.tb_next
    return part or trace


# The signals that the launcher acts on.

RESUMABLE = 75
WARNING = signal.SIGUSR1
"""SLURM's warning ahead of the time limit: a first one is as a SIGTERM, a further one is no news."""


class Signals:
    """Collects SIGTERM, SIGINT, SIGHUP and SIGUSR1, and wakes the launcher when one comes or a rank ends.

    Until ``begin`` there are no ranks, and a signal ends the launcher at once: with 75 for the warning, since the job
    has lost nothing and shall run later, and with the signal's own code for the others. A Ctrl-C that arrives twice
    within ``PRESS_S`` is one.
    """

    def __init__(self) -> None:
        self.seen: list[int] = []
        self._last_at = 0.0
        self._has_ranks = False
        self._reader, writer = os.pipe()
        for end in (self._reader, writer):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, WARNING):
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # nohup stays nohup
                signal.signal(number, self._note)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)

    @property
    def is_asked_to_stop(self) -> bool:
        return bool(self.seen)

    @property
    def is_ended(self) -> bool:
        """Whether a second signal has come."""
        return len(self.seen) > 1

    @property
    def first_name(self) -> str:
        return signal.Signals(self.seen[0]).name

    @property
    def code(self) -> int:
        """The job's code where the first signal found nothing that could save."""
        return RESUMABLE if self.seen[0] == WARNING else 128 + self.seen[0]

    def begin(self) -> None:
        """From now on there are ranks, and signals are news for ``wait``."""
        self._has_ranks = True

    def wait(self, timeout_s: float) -> None:
        """Return at the next signal, at the latest after ``timeout_s``."""
        if select.select([self._reader], [], [], timeout_s)[0]:
            os.read(self._reader, 4096)

    def _note(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.seen and (number == WARNING or is_same_press(number, self.seen[-1], now - self._last_at)):
            return
        self._last_at = now
        self.seen.append(number)
        if not self._has_ranks:
            log.error(f"launch: {self.first_name} before the ranks were started: nothing to save, code {self.code}")
            os._exit(self.code)
