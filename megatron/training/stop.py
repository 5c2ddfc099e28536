"""When a run ends before its last step: a signal, a number of steps, a time."""

from __future__ import annotations

import os
import signal
import time
from types import FrameType

from megatron.training.failure import print_line, told_by_launcher


class StopRequests:
    """Collects this rank's reasons to stop; ``loop.agree`` makes all ranks stop after the same step.

    The first SIGTERM or SIGINT asks for a checkpoint at the next step; the second ends the process at once, or is left
    to our launcher where there is one. A SIGTERM that follows a peer's death means leave without saving.
    """

    def __init__(self) -> None:
        self.exit_interval = 0
        self.deadline: float | None = None
        self.signal_name: str | None = None
        self._previous: dict[int, object] = {}

    def limit(self, exit_interval: int, exit_minutes: float, started: float) -> None:
        """Also stop at multiples of ``exit_interval`` steps and ``exit_minutes`` after ``started``; 0 is never."""
        self.exit_interval = exit_interval
        self.deadline = started + 60.0 * exit_minutes if exit_minutes else None

    def listen(self) -> None:
        """Take over SIGTERM and SIGINT of this process."""
        for number in (signal.SIGTERM, signal.SIGINT):
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
        return None

    def _note(self, number: int, frame: FrameType | None) -> None:
        death = told_by_launcher()
        if death:
            print_line(f"rank {os.environ.get('RANK', '0')}: leaving, {death}")
            os._exit(4)
        if self.signal_name and "MEGATRON_FAILURE_FILE" not in os.environ:
            os._exit(128 + number)
        self.signal_name = signal.Signals(number).name
