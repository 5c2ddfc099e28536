"""When a run ends before its last step, by a signal, a number of steps or a time; and how to go on then."""

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

from megatron.runtime.exit_guard import leave_for_dead_peer
from megatron.runtime.launcher_files import asked_through_launcher, peer_failure

WARNING = signal.SIGUSR1
"""What SLURM sends ahead of the time limit with ``--signal=USR1@120``; a first one is as a SIGTERM."""
SIGNALS = (signal.SIGTERM, signal.SIGINT, WARNING)
PRESS_S = 0.5
"""Within this time a terminal's signal that comes twice is one: it goes to all processes in the foreground, and a
wrapper among them, such as ``timeout --foreground`` or torchrun, passes it on once more."""
LOSING = ("--finetune", "--load-weights-only", "--no-load-optim", "--no-load-rng")
"""Flags that leave out something of a checkpoint: a run that goes on needs all of it (``state.Taken``)."""
REGROUP_VARIABLE = "MEGATRON_REGROUP_FILE"
"""Names a file that the launcher of an elastic job makes while a node waits to be taken in."""
REGROUP = "a node has come: the launcher starts again with it"


class StopRequests:
    """Collects this rank's reasons to stop; ``Trainer.agree`` makes all ranks stop after the same step.

    ``is_awaited``: a node waits for the next save, with which the run is to stop and start again.

    The first signal asks for a checkpoint at the next step; the second ends the process at once, or is left to our
    launcher where there is one. A warning that comes twice is still one warning, and so is a Ctrl-C (``PRESS_S``). A
    SIGTERM that follows a peer's death means leave without saving.
    """

    def __init__(self) -> None:
        self.exit_interval = 0
        self.deadline: float | None = None
        self.kill_switch: Path | None = None
        self.signal_name: str | None = None
        self.requested: str | None = None
        place = os.environ.get(REGROUP_VARIABLE)
        self.is_awaited: Callable[[], bool] = partial(os.path.exists, place) if place else bool
        self._number, self._at = 0, 0.0
        self._previous: dict[int, object] = {}

    def limit(
        self, exit_interval: int, exit_minutes: float, started: float, kill_switch: str | Path | None = None
    ) -> None:
        """Also stop at multiples of ``exit_interval`` steps and ``exit_minutes`` after ``started``; 0 is never.

        Args:
            kill_switch: a file; stop as soon as it is there.
        """
        self.kill_switch = Path(kill_switch) if kill_switch is not None else None
        self.exit_interval = exit_interval
        self.deadline = started + 60.0 * exit_minutes if exit_minutes else None

    def request(self, reason: str) -> None:
        """Let the run stop after this step, for a reason of the caller's."""
        self.requested = reason

    def listen(self) -> None:
        """Take over ``SIGNALS`` of this process."""
        for number in SIGNALS:
            self._previous[number] = signal.signal(number, self._note)

    def restore(self) -> None:
        """Give the signals back."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        self._previous.clear()

    def reason(self, step: int) -> str | None:
        """Return why this rank would stop after ``step``, or None."""
        if self.signal_name:
            return f"received {self.signal_name}"
        if self.exit_interval and step % self.exit_interval == 0:
            return f"--exit-interval {self.exit_interval}"
        if self.deadline is not None and time.monotonic() > self.deadline:
            return "--exit-duration-in-mins has passed"
        if self.kill_switch is not None and self.kill_switch.exists():
            return f"--kill-switch-path {self.kill_switch} is there"
        return self.requested

    def _note(self, number: int, frame: FrameType | None) -> None:
        death = peer_failure()
        if death:
            leave_for_dead_peer(death)
            return
        now = time.monotonic()
        if self.signal_name and (number == WARNING or is_same_press(number, self._number, now - self._at)):
            return
        if self.signal_name and "MEGATRON_FAILURE_FILE" not in os.environ:
            os._exit(128 + number)
        self._number, self._at = number, now
        self.signal_name = asked_through_launcher() or signal.Signals(number).name


def is_same_press(number: int, last: int, since_s: float) -> bool:
    """Return whether a signal is only the echo of the ``last`` one, which came ``since_s`` before it."""
    return number == last and number in (signal.SIGINT, signal.SIGHUP) and since_s < PRESS_S


def how_to_go_on(folder: Path, argv: Sequence[str] | None = None, env: Mapping[str, str] = os.environ) -> str:
    """Return the sentence that says how the run of ``folder`` goes on, for the command that was given.

    Args:
        argv: the script's command line; None: this process's.
    """
    given = _flags([*shlex.split(env.get("MEGATRON_DEFAULTS", "")), *(sys.argv[1:] if argv is None else argv)])
    where = shlex.quote(str(folder))
    saves_here = _is_folder(given.get("--save"), folder)
    loads_here = _is_folder(given.get("--load"), folder) or (saves_here and "--resume" in given)
    losing = [name for name in LOSING if name in given]
    if loads_here:
        command = "Go on with the same command " + (f"without {' and '.join(losing)}" if losing else "as before")
    else:
        script = "of the run script " if "MEGATRON_VARIABLES" in env else ""
        instead = [name for name in ("--load", "--resume", *LOSING) if name in given]
        without = f" in place of {' and '.join(instead)}" if instead else ""
        command = f"Go on with the same command {script}and --load {where}{without}"
    job = env.get("SLURM_JOB_ID")
    if job is None:
        return command
    if loads_here and not losing:
        return f"{command}, or `scontrol requeue {job}`; a script as in examples/slurm does so by itself"
    return f"{command}; with --save {where} --resume --load-if-exists a requeued job goes on by itself (examples/slurm)"


def _is_folder(given: str | None, folder: Path) -> bool:
    return given is not None and Path(given).resolve() == folder.resolve()


def _flags(argv: Sequence[str]) -> dict[str, str]:
    """Return the flags of a command line with the word that follows each, or what stands behind its "="."""
    found = {}
    for word, following in zip_longest(argv, argv[1:], fillvalue=""):
        if word.startswith("--"):
            name, has_value, value = word.partition("=")
            found[name] = value if has_value else following
    return found
