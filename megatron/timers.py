"""Named stop watches and a window for rates."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager


class Timers:
    """Seconds spent under each name since the last ``drain``."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = defaultdict(float)

    @contextmanager
    def measure(self, name: str) -> Iterator[None]:
        """Add the time of the ``with`` block to ``name``."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[name] += time.perf_counter() - start

    def drain(self) -> dict[str, float]:
        """Return the seconds by name and start again from zero."""
        seconds = dict(self._seconds)
        self._seconds.clear()
        return seconds
