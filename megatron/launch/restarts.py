"""Whether a job that has failed starts again: --max-restarts, and progress.

A start makes progress when a checkpoint becomes durable whose step is above that of the last one before it, which may
have been a step back; rank 0 tells of it in the progress file (megatron/training/progress_file.py). ``FRUITLESS``
starts in a row without progress end the job: what ends them will end the next one too.
"""

from __future__ import annotations

from pathlib import Path

from megatron.training import progress_file

FRUITLESS = 3
RESTARTED = (1, 4)
"""Codes after which another start may help: a rank died or timed out, or a defect. The others come back as they are."""


class Restarts:
    """Counts the starts of one job.

    Args:
        most: starts after the first.
        progress: the progress file; only node 0's is written.
    """

    def __init__(self, most: int, progress: Path) -> None:
        self.most, self.done = most, 0
        self._progress = progress
        self._last: int | None = None
        self._fruitless = 0

    @property
    def durable(self) -> int | None:
        """The step of the newest checkpoint that this job has written, or None."""
        return progress_file.committed_step(self._progress)

    def against(self, code: int, *, is_node_0: bool) -> str:
        """Return why there is no start after one that ended with ``code``, or "" if there may be.

        Called once after each start that failed.
        """
        if code not in RESTARTED:
            return f"code {code} comes back as it is"
        if is_node_0 and self._is_fruitless():
            newest = "no checkpoint is durable" if self._last is None else f"the newest is that of step {self._last}"
            return (
                f"{FRUITLESS} starts in a row ended before a new checkpoint was durable ({newest}), so no further one "
                "is made. Look at what ended them above, and lower --save-interval if they only came too short"
            )
        if self.done >= self.most:
            return f"all of --max-restarts {self.most} are used"
        return ""

    def origin(self) -> str:
        """Return where the next start begins, in words."""
        step = self.durable
        return (
            "as the first one did, for this job has no durable checkpoint yet"
            if step is None
            else (f"from the checkpoint of step {step}")
        )

    def _is_fruitless(self) -> bool:
        """Whether this start was the last of ``FRUITLESS`` without progress."""
        last, self._last = self._last, self.durable
        has_grown = self._last is not None and (last is None or self._last > last)
        self._fruitless = 0 if has_grown else self._fruitless + 1
        return self._fruitless >= FRUITLESS
