"""Requests to stop a run before its last step, from signals or limits, and the message on how to resume it."""

from __future__ import annotations

import os
import shlex
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import zip_longest
from pathlib import Path
from types import FrameType

from megatron.runtime.exit_guard import exit_for_dead_peer
from megatron.runtime.launcher_files import forwarded_signal, peer_failure

TIME_LIMIT_SIGNAL = signal.SIGUSR1
"""Signal that SLURM sends before the time limit with ``--signal=USR1@120``; the first one is handled like SIGTERM."""
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, TIME_LIMIT_SIGNAL)
KEY_PRESS_S = 0.5
"""Seconds within which repeated terminal signals count as one key press: the terminal signals all foreground processes,
and a wrapper among them, such as ``timeout --foreground`` or torchrun, forwards its signal again."""
PARTIAL_RESTORE_FLAGS = ("--finetune", "--load-weights-only", "--no-load-optim", "--no-load-rng")
"""Flags that restore only part of a checkpoint; resuming a run needs all of it (``RestoreOptions``)."""
REGROUP_VARIABLE = "MEGATRON_REGROUP_FILE"
"""Environment variable: path of a file that the launcher of an elastic job creates while a node waits to join."""
REGROUP_REASON = "a node has joined: the launcher restarts the job with it"


class StopRequests:
    """Collects this rank's reasons to stop; ``Trainer.agree`` makes all ranks stop after the same step.

    The first signal requests a checkpoint and a stop after the current step. The second one ends the process
    immediately; under our launcher, the launcher does so. SLURM's warning and a Ctrl-C within ``KEY_PRESS_S`` are not
    counted as a second signal. If the launcher sends SIGTERM because a peer has died, the process exits without saving.

    Attributes:
        is_node_waiting: returns True if a node waits for the next save, after which the job restarts.
    """

    def __init__(self) -> None:
        self.exit_interval = 0
        self.deadline: float | None = None
        self.kill_switch: Path | None = None
        self.signal_name: str | None = None
        self.requested_reason: str | None = None
        regroup_file = os.environ.get(REGROUP_VARIABLE)
        self.is_node_waiting: Callable[[], bool] = partial(os.path.exists, regroup_file) if regroup_file else bool
        self._last_signum, self._last_signal_time = 0, 0.0
        self._previous_handlers: dict[int, object] = {}

    def set_limits(
        self, exit_interval: int, exit_minutes: float, start_time: float, kill_switch: str | Path | None = None
    ) -> None:
        """Also stop at multiples of ``exit_interval`` steps, and ``exit_minutes`` after ``start_time``; 0: no limit.

        Args:
            kill_switch: path of a file; stop as soon as it exists.
        """
        self.kill_switch = Path(kill_switch) if kill_switch is not None else None
        self.exit_interval = exit_interval
        self.deadline = start_time + 60.0 * exit_minutes if exit_minutes else None

    def request(self, reason: str) -> None:
        """Request a stop after this step."""
        self.requested_reason = reason

    def install_handlers(self) -> None:
        """Install handlers for ``STOP_SIGNALS``."""
        for signum in STOP_SIGNALS:
            self._previous_handlers[signum] = signal.signal(signum, self._handle_signal)

    def restore_handlers(self) -> None:
        """Restore the previous signal handlers."""
        for signum, handler in self._previous_handlers.items():
            signal.signal(signum, handler)  # type: ignore[arg-type]
        self._previous_handlers.clear()

    def stop_reason(self, step: int) -> str | None:
        """Return the reason to stop this rank after ``step``, or None."""
        if self.signal_name:
            return f"received {self.signal_name}"
        if self.exit_interval and step % self.exit_interval == 0:
            return f"--exit-interval {self.exit_interval}"
        if self.deadline is not None and time.monotonic() > self.deadline:
            return "--exit-duration-in-mins has passed"
        if self.kill_switch is not None and self.kill_switch.exists():
            return f"--kill-switch-path {self.kill_switch} exists"
        return self.requested_reason

    def _handle_signal(self, signum: int, frame: FrameType | None) -> None:
        """Handle a signal: record it, or exit after a second signal or the death of a peer."""
        failure_text = peer_failure()
        if failure_text:
            exit_for_dead_peer(failure_text)
            return
        now = time.monotonic()
        if self.signal_name and (
            signum == TIME_LIMIT_SIGNAL
            or is_repeated_key_press(signum, self._last_signum, now - self._last_signal_time)
        ):
            return
        if self.signal_name and "MEGATRON_FAILURE_FILE" not in os.environ:
            os._exit(128 + signum)
        self._last_signum, self._last_signal_time = signum, now
        self.signal_name = forwarded_signal() or signal.Signals(signum).name


def is_repeated_key_press(signum: int, last_signum: int, elapsed_s: float) -> bool:
    """Return True if ``signum`` and ``last_signum``, ``elapsed_s`` seconds earlier, are caused by one key press."""
    return signum == last_signum and signum in (signal.SIGINT, signal.SIGHUP) and elapsed_s < KEY_PRESS_S


def resume_advice(folder: Path, argv: Sequence[str] | None = None, env: Mapping[str, str] = os.environ) -> str:
    """Explain how to resume the run in ``folder``: the flags to change on the current command line.

    Args:
        argv: the script's command line; None: this process's.
    """
    flags = _parse_flags([*shlex.split(env.get("MEGATRON_DEFAULTS", "")), *(sys.argv[1:] if argv is None else argv)])
    target = shlex.quote(str(folder))
    is_save_folder = _is_same_folder(flags.get("--save"), folder)
    is_load_folder = _is_same_folder(flags.get("--load"), folder) or (is_save_folder and "--resume" in flags)
    partial_flags = [name for name in PARTIAL_RESTORE_FLAGS if name in flags]
    if is_load_folder:
        command = "Resume with the same command " + (
            f"without {' and '.join(partial_flags)}" if partial_flags else "as before"
        )
    else:
        script = "of the run script " if "MEGATRON_VARIABLES" in env else ""
        replaced = [name for name in ("--load", "--resume", *PARTIAL_RESTORE_FLAGS) if name in flags]
        replaced_text = f" in place of {' and '.join(replaced)}" if replaced else ""
        command = f"Resume with the same command {script}and --load {target}{replaced_text}"
    slurm_job = env.get("SLURM_JOB_ID")
    if slurm_job is None:
        return command
    if is_load_folder and not partial_flags:
        return f"{command}, or `scontrol requeue {slurm_job}`; a script like those in examples/slurm requeues itself"
    return (
        f"{command}; with --save {target} --resume --load-if-exists a requeued job resumes by itself (examples/slurm)"
    )


def _is_same_folder(flag_value: str | None, folder: Path) -> bool:
    return flag_value is not None and Path(flag_value).resolve() == folder.resolve()


def _parse_flags(argv: Sequence[str]) -> dict[str, str]:
    """Map each flag on a command line to the next word or the value after "="."""
    flags = {}
    for argument, next_argument in zip_longest(argv, argv[1:], fillvalue=""):
        if argument.startswith("--"):
            name, has_value, value = argument.partition("=")
            flags[name] = value if has_value else next_argument
    return flags
