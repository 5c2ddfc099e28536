"""Memory of processes that share pages: what each has alone, and its part of what several have."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType


def pss_bytes(pid: int) -> int:
    """Return the proportional set size of a process: a page of k processes counts 1/k in each. 0 if it ended."""
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    return 0


class PeakOfSum:
    """Looks at the sum over processes from time to time while the block runs; ``bytes`` is the largest that it saw.

    Args:
        pids: gives the processes that there are now.
    """

    def __init__(self, pids: Callable[[], list[int]], interval_s: float = 0.2) -> None:
        self._pids, self._interval_s, self._ended = pids, interval_s, threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self.bytes = 0

    def __enter__(self) -> PeakOfSum:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()

    def look(self) -> int:
        """Return the sum now."""
        found = sum(pss_bytes(pid) for pid in self._pids())
        self.bytes = max(self.bytes, found)
        return found

    def _watch(self) -> None:
        while not self._ended.wait(self._interval_s):
            self.look()
