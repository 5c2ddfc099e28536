"""The signals that the launcher acts on."""

from __future__ import annotations

import os
import select
import signal
from types import FrameType


class Signals:
    """Collects SIGTERM, SIGINT and SIGHUP, and wakes the launcher when one comes or a rank ends."""

    def __init__(self) -> None:
        self.seen: list[int] = []
        self._reader, writer = os.pipe()
        for end in (self._reader, writer):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # nohup stays nohup
                signal.signal(number, self._note)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)

    def wait(self, timeout_s: float) -> None:
        """Return at the next signal, at the latest after ``timeout_s``."""
        if select.select([self._reader], [], [], timeout_s)[0]:
            os.read(self._reader, 4096)

    def raise_if_seen(self) -> None:
        """End the launcher if it was asked to stop; for the time before the ranks exist."""
        if self.seen:
            raise SystemExit(128 + self.seen[0])

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.seen.append(number)
