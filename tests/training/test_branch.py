"""Which checkpoints of a folder are on a run's way."""

from __future__ import annotations

import json

from megatron.training.checkpoint_lineage import CheckpointLineage


def test_a_run_that_went_on_from_an_older_one_leaves_those_after_it() -> None:
    first = CheckpointLineage()
    first.continue_from(3, 3)
    assert first.to_metadata() == {} and first.has(1)
    first.continue_from(2, 5)
    again = CheckpointLineage.of(json.loads(json.dumps(first.to_metadata())))
    again.continue_from(7, 8)
    assert [number for number in range(1, 11) if again.has(number)] == [1, 2, 6, 7, 9, 10]


def test_an_earlier_run_in_the_folder_is_not_on_the_way_of_a_restart_either() -> None:
    again = CheckpointLineage.of(CheckpointLineage(earlier=4).to_metadata())
    again.continue_from(6, 6)
    assert [number for number in range(1, 8) if again.has(number)] == [5, 6, 7]
