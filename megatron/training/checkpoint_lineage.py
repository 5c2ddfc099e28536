"""CheckpointLineage: the checkpoints in a run folder that belong to the run's current history."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

_METADATA_KEY = "branch"  # key in the metadata of a checkpoint


@dataclass
class CheckpointLineage:
    """Checkpoints that belong to the current history of a run, by sequence number in its folder; on rank 0.

    Attributes:
        earlier: checkpoints up to this number belong to an earlier run, which the current one does not continue.
        left: ranges (first and last number) that the run abandoned when it resumed from an older checkpoint.
    """

    earlier: int = 0
    left: list[list[int]] = field(default_factory=list)

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, Any]) -> CheckpointLineage:
        """Read the lineage from checkpoint metadata."""
        return cls(**metadata.get(_METADATA_KEY, {}))

    def continue_from(self, sequence: int, last: int) -> None:
        """Resume from checkpoint ``sequence`` and mark the later ones, up to ``last``, as abandoned."""
        if last > sequence:
            self.left.append([sequence + 1, last])

    def contains(self, sequence: int) -> bool:
        """Return True if the checkpoint belongs to the run's current history."""
        return sequence > self.earlier and not any(first <= sequence <= last for first, last in self.left)

    def to_metadata(self) -> dict[str, Any]:
        """Return the metadata entry; empty if all checkpoints in the folder belong to the run."""
        return {_METADATA_KEY: asdict(self)} if self.earlier or self.left else {}
