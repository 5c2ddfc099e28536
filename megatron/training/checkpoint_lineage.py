"""CheckpointLineage: which checkpoints of a run folder belong to the current history of the run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

_NAME = "branch"  # in the state of a checkpoint


@dataclass
class CheckpointLineage:
    """The way of a run, in sequence numbers of its folder's checkpoints. Rank 0 knows it.

    Attributes:
        earlier: up to this number they are of an earlier run, from which this one has not gone on.
        left: first and last of those that were there when the run went on from an older one.
    """

    earlier: int = 0
    left: list[list[int]] = field(default_factory=list)

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> CheckpointLineage:
        """Return the way to a checkpoint with this state."""
        return cls(**state.get(_NAME, {}))

    def go_on_from(self, sequence: int, last: int) -> None:
        """The run goes on from the checkpoint ``sequence`` of its way, and ``last`` is the last one there."""
        if last > sequence:
            self.left.append([sequence + 1, last])

    def has(self, sequence: int) -> bool:
        """Tell whether the checkpoint is on the way."""
        return sequence > self.earlier and not any(first <= sequence <= last for first, last in self.left)

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint's state says of it; nothing where the folder has no other way."""
        return {_NAME: asdict(self)} if self.earlier or self.left else {}
