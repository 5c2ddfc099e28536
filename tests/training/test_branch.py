"""Which checkpoints of a folder are on a run's way."""

from __future__ import annotations

import json

from megatron.training.checkpoint_lineage import CheckpointLineage


def test_resume_from_older_step_excludes_later_checkpoints() -> None:
    first = CheckpointLineage()
    first.continue_from(3, 3)
    assert first.to_metadata() == {} and first.contains(1)
    first.continue_from(2, 5)
    restored = CheckpointLineage.from_metadata(json.loads(json.dumps(first.to_metadata())))
    restored.continue_from(7, 8)
    assert [step for step in range(1, 11) if restored.contains(step)] == [1, 2, 6, 7, 9, 10]


def test_restart_excludes_checkpoints_of_earlier_run() -> None:
    restored = CheckpointLineage.from_metadata(CheckpointLineage(earlier=4).to_metadata())
    restored.continue_from(6, 6)
    assert [step for step in range(1, 8) if restored.contains(step)] == [5, 6, 7]
