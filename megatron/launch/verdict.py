"""Which rank caused the end of a job, and the job's exit code.

A rank that dies takes others with it: they report a lost peer (4) a little later, or even a little earlier, than the
one that failed is gone. So the culprit is the weightiest of those that ended within ``WINDOW_S`` of the first failure,
and among equals the first:

| weight | how it ended | the job's code |
|---|---|---|
| 0 | 2, 3, 5 or 75 | the same |
| 1 | by a signal; by any other exception | 4; 1 |
| 2 | well (0) while others or its own run were not done; 4, and it says itself that the others waited for it | 4 |
| 3 | 4: it lost a peer or timed out | 4 |

Where all have lost a peer and a rank did not leave with them, so that the launcher had to kill it, that rank is named:
the others waited for it.
"""

from __future__ import annotations

import signal
from collections.abc import Collection
from dataclasses import dataclass

from megatron.launch.signals import RESUMABLE
from megatron.training import position

SPECIFIC = (2, 3, 5, RESUMABLE)
WINDOW_S = 1.0


@dataclass(frozen=True, kw_only=True)
class Exit:
    """How one rank ended; ``status`` is its exit code, or minus the signal that ended it."""

    rank: int
    pid: int
    status: int
    at: float
    """When it said why it ends, else when it had ended: seconds since the start of the ranks, which all nodes begin
    together. Who says it first may take longest to end."""
    was_told: bool = False
    """The launcher had already told it to leave because a peer had died."""
    place: str = ""
    """Such as "stage 1, tensor 0, data 0"; empty if the rank did not come so far as to know it."""
    doing: str = ""
    """What it was at, such as "step 7, forward of micro-batch 3"."""
    words: str = ""
    """The error, if it is one that all ranks raised alike; rank 0 prints it unless it is ended before."""
    hint: str = ""
    """What may be behind it; the launcher alone says it."""
    state: str = ""
    """Whether its run had ended, and whether it has said that the others wait for it: see position.py."""

    @property
    def weight(self) -> int:
        if self.status in SPECIFIC:
            return 0
        return {0: 2, 4: 2 if self.is_late else 3}.get(self.status, 1)

    @property
    def has_failed(self) -> bool:
        """Whether it left otherwise than at the end of its run or on request."""
        return self.status not in (0, RESUMABLE) or (self.status == 0 and bool(self.state))

    @property
    def is_late(self) -> bool:
        """Whether it has left since it got no further itself, for which the others waited."""
        return self.status == 4 and self.state == position.LATE

    @property
    def is_consequence(self) -> bool:
        """Whether this end only follows from the launcher's own signal."""
        if self.is_late:
            return False
        return self.was_told and self.status in (0, 4, 75, -signal.SIGTERM, -signal.SIGKILL, 128 + signal.SIGTERM)

    @property
    def is_stuck(self) -> bool:
        """Whether it did not leave when the launcher told it to, and had to be killed."""
        return self.was_told and self.status == -signal.SIGKILL

    @property
    def job_code(self) -> int:
        if self.status in SPECIFIC:
            return self.status
        return 4 if self.status in (0, 4) or self.status < 0 else 1

    def __str__(self) -> str:
        who = f"rank {self.rank} ({self.place + '; ' if self.place else ''}pid {self.pid})"
        at = f", at {self.doing}" if self.doing else ""
        if self.is_stuck:
            return f"{who}, which did not leave with the others and had to be killed{at}"
        if self.status < 0:
            return f"{who} by {_signal_name(-self.status)}{at}"
        if self.status == 0:
            early = "before its run was done" if self.state else "while others were still running"
            return f"{who}, which left early with 0 {early}{at}"
        if self.is_late:
            return f"{who}, which got no further and left with exit code 4{at}"
        alike = "every rank alike, first by " if self.words else ""
        return f"{alike}{who} with exit code {self.status}{at}"


def culprit(exits: Collection[Exit]) -> Exit | None:
    """Return the rank that caused the end, or None if no rank ended of itself."""
    own = [one for one in exits if not one.is_consequence]
    if not own:
        return None
    failed = [one.at for one in own if one.has_failed]
    start = min(failed) if failed else min(one.at for one in own)
    stuck = first_stuck(exits)
    if stuck is not None and all(one.status == 4 for one in own):
        return stuck
    near = [one for one in own if one.at <= start + WINDOW_S]
    return min(near, key=lambda one: (one.weight, one.at))


def first_stuck(exits: Collection[Exit]) -> Exit | None:
    """Return the lowest rank that had to be killed, or None."""
    return min((one for one in exits if one.is_stuck), key=lambda one: one.rank, default=None)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
