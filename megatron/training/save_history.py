"""Saves: time of the last save, its cost, and failed saves."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from megatron.checkpoint import (
    AsyncSaver,
)
from megatron.errors import CheckpointError
from megatron.training.checkpoint_lineage import CheckpointLineage


@dataclass
class Saves:
    """One for each run, on every rank.

    Attributes:
        background: writes while training goes on; None: saves are written at once.
        last_at: ``time.monotonic()`` of the last save, also one that failed, or of the start.
        stalled_s: seconds in which the training has waited for saves since they were last told.
        failure: of the last save, if it failed, and its step.
        lineage: which checkpoints of the folder are this run's; known on rank 0.
    """

    background: AsyncSaver | None = None
    last_at: float = field(default_factory=time.monotonic)
    stalled_s: float = 0.0
    failure: CheckpointError | None = None
    failed_step: int = -1
    lineage: CheckpointLineage = field(default_factory=CheckpointLineage)

    def share_since_last(self, stall_s: float) -> float:
        """Return ``stall_s`` as a share of the time since the save before, and begin to count anew."""
        self.stalled_s += stall_s
        now = time.monotonic()
        share = stall_s / max(now - self.last_at, stall_s, 1e-9)
        self.last_at = now
        return share

    def drain_stalled_s(self) -> float:
        """Return the seconds of waiting for saves since the last call."""
        stalled_s, self.stalled_s = self.stalled_s, 0.0
        return stalled_s

    def note_failure(self, error: CheckpointError, step: int) -> None:
        """Remember that the save of ``step`` failed; by time the next one is as far off as after one that did not."""
        self.failure, self.failed_step = error, step
        self.last_at = time.monotonic()
