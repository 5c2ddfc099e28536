"""The signals that the launcher acts on."""

from __future__ import annotations

import os
import select
import signal
import time
from types import FrameType

from megatron import log
from megatron.training.stop import is_same_press

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
