"""Start, signal and reap the rank processes of a node; signals that the launcher handles."""

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
from megatron.runtime.exit_signals import is_repeated_key_press

# Each rank leads its own session and process group. So a Ctrl-C in the terminal reaches only the launcher, which
# forwards it once, and child processes of a rank (data workers) are killed with it. A rank dies with the launcher
# (PR_SET_PDEATHSIG).

HANDLED_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGCHLD)
"""Signals for which the launcher has handlers."""


class RankProcess:
    """A rank that has been started: its rank, process id and exit status."""

    def __init__(self, rank: int, local_rank: int, pid: int) -> None:
        self.rank, self.local_rank, self.pid = rank, local_rank, pid
        self.status: int | None = None
        self.ended_at = 0.0

    @property
    def is_alive(self) -> bool:
        return self.status is None

    def reap(self) -> bool:
        """If the rank has just exited, kill its child processes, record its status and return True."""
        if not self.is_alive or os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            return False
        self.ended_at = time.monotonic()
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)  # before waitpid, after which the process id may be reused
        self.status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return True

    def terminate(self) -> None:
        """Send SIGTERM to the rank only, since its data workers must live while it saves."""
        if self.is_alive:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGTERM)

    def kill(self) -> None:
        """Kill the rank and its child processes."""
        if self.is_alive:
            with suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)


class Gate:
    """Blocks the forked ranks of one start until the last of them has been forked.

    A running rank connects to the store, and the store's thread in the launcher then resolves the peer's name while
    holding a lock of glibc. A rank that is forked at that moment inherits the locked lock, and hangs.
    """

    def __init__(self) -> None:
        self._read_end, self._write_end = os.pipe()

    def open(self) -> None:
        """Release all ranks; called in the launcher."""
        os.close(self._write_end)
        os.close(self._read_end)

    def wait(self) -> None:
        """Wait until the launcher has opened the gate; called in a rank."""
        os.close(self._write_end)
        os.read(self._read_end, 1)
        os.close(self._read_end)


def start_rank(
    script: str,
    arguments: Sequence[str],
    env: Mapping[str, str],
    *,
    is_forked: bool,
    inherits_stdin: bool = False,
    gate: Gate | None = None,
) -> int:
    """Start one rank and return its process id.

    Args:
        is_forked: run the script in a fork of this process with the imported modules; otherwise in a new Python
            process.
        inherits_stdin: inherit the launcher's standard input; otherwise it is empty.
        gate: gate at which a forked rank waits before it starts.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    launcher = os.getpid()
    # The rank's copy of our handler would swallow signals.
    previous_mask = signal.pthread_sigmask(signal.SIG_BLOCK, HANDLED_SIGNALS)
    pid = os.fork()
    if pid:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous_mask)
        return pid
    try:
        _become_rank(launcher, inherits_stdin)
        if is_forked:
            if gate is not None:
                gate.wait()
            os.environ.clear()
            os.environ.update(env)
            _close_inherited()
            _run_and_exit(script, arguments)
        os.execve(sys.executable, [sys.executable, *_python_flags(), script, *arguments], dict(env))
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


def _become_rank(launcher: int, inherits_stdin: bool) -> None:
    """Set up this fork as a rank: its own session, default signal handlers, and its standard input."""
    os.setsid()
    die_with_parent()
    if os.getppid() != launcher:  # the launcher died before the line above
        os._exit(1)
    signal.set_wakeup_fd(-1)
    for signum in HANDLED_SIGNALS:
        signal.signal(signum, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # SLURM may signal all processes; a rank that can save installs a handler later.
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, HANDLED_SIGNALS)
    if not inherits_stdin:
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.close(null)


def _python_flags() -> list[str]:
    """Return the current Python flags that affect how a script runs."""
    return (["-O"] * sys.flags.optimize) + (["-B"] if sys.flags.dont_write_bytecode else [])


def _close_inherited() -> None:
    """Replace the launcher's sockets and files by the null device.

    Their descriptors must stay in use. When an object of the launcher is garbage-collected in this process, it closes
    its descriptor. If this rank had reused the number, a file of the rank would be closed (gloo's epoll, a checkpoint).
    """
    null = os.open(os.devnull, os.O_RDWR)
    for name in os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else ():
        descriptor = int(name)
        if descriptor > 2 and descriptor != null and _is_open(descriptor):
            os.dup2(null, descriptor, inheritable=False)
    os.close(null)


def _is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True


def _run_and_exit(script: str, arguments: Sequence[str]) -> None:
    """Run ``script`` as ``__main__`` and exit as Python would."""
    sys.argv = [script, *arguments]
    sys.path[0] = os.path.dirname(os.path.abspath(script))
    code = 1
    try:
        runpy.run_path(script, run_name="__main__")
        code = 0
    except SystemExit as stop:
        code = _exit_code(stop)
    except BaseException as error:
        sys.excepthook(type(error), error, _without_launcher_frames(error.__traceback__, script))
    finally:
        with suppress(BaseException):
            threading._shutdown()  # type: ignore[attr-defined]
            atexit._run_exitfuncs()
        with suppress(BaseException):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code & 0xFF)


def _exit_code(stop: SystemExit) -> int:
    if stop.code is None:
        return 0
    if isinstance(stop.code, int):
        return stop.code
    sys.stderr.write(f"{stop.code}\n")
    return 1


def _without_launcher_frames(trace: TracebackType | None, script: str) -> TracebackType | None:
    """Drop the launcher's frames, so that the traceback starts in the script."""
    entry = trace
    while entry is not None and entry.tb_frame.f_code.co_filename != script:
        entry = entry.tb_next
    return entry or trace


# Signals that the launcher handles.

RESUMABLE_CODE = 75
TIME_LIMIT_SIGNAL = signal.SIGUSR1
"""SLURM's warning before the time limit: the first one is handled like SIGTERM, further ones are ignored."""


class Signals:
    """Collects SIGTERM, SIGINT, SIGHUP and SIGUSR1, and wakes the launcher when one arrives or a rank exits.

    Until ``set_ranks_running`` is called there are no ranks, and a signal ends the launcher immediately. The exit code
    is 75 for SLURM's warning, because the job can run later without loss, and 128 + the signal's number for the other
    signals. Two Ctrl-C within ``KEY_PRESS_S`` count as one.
    """

    def __init__(self) -> None:
        self.received: list[int] = []
        self._last_at = 0.0
        self._has_ranks = False
        self._reader, writer = os.pipe()
        for pipe_end in (self._reader, writer):
            os.set_blocking(pipe_end, False)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, TIME_LIMIT_SIGNAL):
            if (
                signum != signal.SIGHUP or signal.getsignal(signum) != signal.SIG_IGN
            ):  # under nohup, SIGHUP stays ignored
                signal.signal(signum, self._handle)
        signal.signal(signal.SIGCHLD, lambda signum, frame: None)

    @property
    def is_asked_to_stop(self) -> bool:
        return bool(self.received)

    @property
    def is_ended(self) -> bool:
        """True if a second signal was received."""
        return len(self.received) > 1

    @property
    def first_name(self) -> str:
        return signal.Signals(self.received[0]).name

    @property
    def code(self) -> int:
        """The job's exit code if there was nothing to save at the first signal."""
        return RESUMABLE_CODE if self.received[0] == TIME_LIMIT_SIGNAL else 128 + self.received[0]

    def set_ranks_running(self) -> None:
        """Record that ranks are running: from now on, a signal wakes ``wait`` instead of ending the launcher."""
        self._has_ranks = True

    def wait(self, timeout_s: float) -> None:
        """Wait up to ``timeout_s`` for the next signal."""
        if select.select([self._reader], [], [], timeout_s)[0]:
            os.read(self._reader, 4096)

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        """Handle a signal: record it, or end the launcher if there are no ranks yet."""
        now = time.monotonic()
        if self.received and (
            signum == TIME_LIMIT_SIGNAL or is_repeated_key_press(signum, self.received[-1], now - self._last_at)
        ):
            return
        self._last_at = now
        self.received.append(signum)
        if not self._has_ranks:
            log.error(f"launch: {self.first_name} before the ranks were started: nothing to save, code {self.code}")
            os._exit(self.code)
