"""What a run remembers of its saves: when the last one was, what they cost, and which one failed."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path

from megatron import log
from megatron.checkpoint import BackgroundSaver
from megatron.checkpoint.folders import remove
from megatron.config.checkpoint import DEFAULT_KEPT
from megatron.errors import CheckpointError


@dataclass
class Saves:
    """One for each run, on every rank.

    Attributes:
        background: writes while training goes on; None: saves are written at once.
        last_at: ``time.monotonic()`` of the last save, also one that failed, or of the start.
        failure: of the last save, if it failed, and its step.
        unasked: checkpoints of the default interval that are durable, the oldest first.
        foreign: names in the folder of checkpoints that are of an earlier run; known on rank 0.
        is_unasked: the save under way is one of the default interval.
    """

    background: BackgroundSaver | None = None
    last_at: float = field(default_factory=time.monotonic)
    failure: CheckpointError | None = None
    failed_step: int = -1
    unasked: list[Path] = field(default_factory=list)
    foreign: frozenset[str] = frozenset()
    is_unasked: bool = False

    def share_since_last(self, stall_s: float) -> float:
        """Return ``stall_s`` as a share of the time since the save before, and begin to count anew."""
        now = time.monotonic()
        share = stall_s / max(now - self.last_at, stall_s, 1e-9)
        self.last_at = now
        return share

    def note_failure(self, error: CheckpointError, step: int) -> None:
        """Remember that the save of ``step`` failed; by time the next one is as far off as after one that did not."""
        self.failure, self.failed_step, self.is_unasked = error, step, False
        self.last_at = time.monotonic()

    def note_durable(self, path: Path, *, deletes: bool) -> None:
        """Remember that ``path`` is whole; of those that nobody asked for ``deletes`` all but the last few."""
        if not self.is_unasked:
            return
        self.is_unasked = False
        self.unasked.append(path)
        while len(self.unasked) > DEFAULT_KEPT:
            old = self.unasked.pop(0)
            if deletes:
                _remove(old)


def _remove(path: Path) -> None:
    try:
        remove(path)
    except OSError as error:
        log.warning(f"the old checkpoint {path} could not be deleted ({error})")
