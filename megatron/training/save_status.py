"""SaveStatus: time, duration and failure of a run's saves."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from megatron.errors import CheckpointError


@dataclass
class SaveStatus:
    """A run's last save, on every rank.

    Attributes:
        last_time: ``time.monotonic()`` at the last save, successful or not, or at the start of the run.
        stalled_s: seconds that training has waited for saves since the last ``drain_stalled_s``.
        failure: the last save's error, or None if it succeeded.
        failed_step: step whose save failed.
    """

    last_time: float = field(default_factory=time.monotonic)
    stalled_s: float = 0.0
    failure: CheckpointError | None = None
    failed_step: int = -1

    def record_stall(self, stall_s: float) -> float:
        """Count a stall of ``stall_s`` seconds by a save; return its fraction of the time since the last save."""
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
