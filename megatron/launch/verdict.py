"""Which rank caused the end of a job, and the job's exit code.

A rank that dies takes others with it: they report a lost peer (4) a little later, or even a little earlier, than the
one that failed is gone. So the culprit is the weightiest of those that ended within ``WINDOW_S`` of the first failure,
and among equals the first:

| weight | how it ended | the job's code |
|---|---|---|
| 0 | 2, 3, 5 or 75 | the same |
| 1 | by a signal; by any other exception | 4; 1 |
| 2 | well (0) while others were still running | 4 |
| 3 | 4: it lost a peer or timed out | 4 |
"""

from __future__ import annotations

import signal
from collections.abc import Iterable
from dataclasses import dataclass

SPECIFIC = (2, 3, 5, 75)
WINDOW_S = 1.0


@dataclass(frozen=True, kw_only=True)
class Exit:
    """How one rank ended; ``status`` is its exit code, or minus the signal that ended it."""

    rank: int
    pid: int
    status: int
    at: float
    was_told: bool = False
    """The launcher had already told it to leave because a peer had died."""
    place: str = ""
    """Such as "stage 1, tensor 0, data 0"; empty if the rank did not come so far as to know it."""
    doing: str = ""
    """What it was at, such as "step 7, forward of micro-batch 3"."""
    hint: str = ""
    """What may be behind it; the launcher alone says it."""

    @property
    def weight(self) -> int:
        if self.status in SPECIFIC:
            return 0
        return {0: 2, 4: 3}.get(self.status, 1)

    @property
    def is_consequence(self) -> bool:
        """Whether this end only follows from the launcher's own signal."""
        return self.was_told and self.status in (0, 4, 75, -signal.SIGTERM, -signal.SIGKILL, 128 + signal.SIGTERM)

    @property
    def job_code(self) -> int:
        if self.status in SPECIFIC:
            return self.status
        return 4 if self.status in (0, 4) or self.status < 0 else 1

    def __str__(self) -> str:
        who = f"rank {self.rank} ({self.place + '; ' if self.place else ''}pid {self.pid})"
        at = f", at {self.doing}" if self.doing else ""
        if self.status < 0:
            return f"{who} by {_signal_name(-self.status)}{at}"
        if self.status == 0:
            return f"{who} left early with 0 while others were still running{at}"
        return f"{who} with exit code {self.status}{at}"


def culprit(exits: Iterable[Exit]) -> Exit | None:
    """Return the rank that caused the end, or None if no rank ended of itself."""
    own = [one for one in exits if not one.is_consequence]
    if not own:
        return None
    failed = [one.at for one in own if one.status not in (0, 75)]
    start = min(failed) if failed else min(one.at for one in own)
    near = [one for one in own if one.at <= start + WINDOW_S]
    return min(near, key=lambda one: (one.weight, one.at))


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
