"""SaveStatus: time, duration and failure of a run's saves."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from megatron.errors import CheckpointError


@dataclass
class SaveStatus:
    """The last save of a run, on every rank.

    Attributes:
        last_time: ``time.monotonic()`` of the last save, successful or not, or of the start of the run.
        stalled_s: seconds for which training has waited for saves since the last call of ``drain_stalled_s``.
        failure: the error of the last save, or None if it succeeded.
        failed_step: step of the failed save.
    """

    last_time: float = field(default_factory=time.monotonic)
    stalled_s: float = 0.0
    failure: CheckpointError | None = None
    failed_step: int = -1

    def record_stall(self, stall_s: float) -> float:
        """Count a save that stalled training for ``stall_s``; return its fraction of the time since the last save."""
        self.stalled_s += stall_s
        now = time.monotonic()
        share = stall_s / max(now - self.last_time, stall_s, 1e-9)
        self.last_time = now
        return share

    def drain_stalled_s(self) -> float:
        """Return and reset ``stalled_s``."""
        stalled_s, self.stalled_s = self.stalled_s, 0.0
        return stalled_s

    def record_failure(self, error: CheckpointError, step: int) -> None:
        """Record that the save of ``step`` failed; --save-interval-minutes counts from now."""
        self.failure, self.failed_step = error, step
        self.last_time = time.monotonic()
