"""Launchers of an elastic job: nodes are lost and come back, also the one that leads."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.elastic_jobs import Nodes

FLAGS = ("--preload", "torch", "--node-timeout", "3", "--init-timeout", "4")


@pytest.fixture
def made() -> Iterator[list[Nodes]]:
    """Jobs whose launchers are ended, whatever becomes of the test."""
    jobs: list[Nodes] = []
    yield jobs
    for job in jobs:
        job.kill()


def test_the_leader_is_lost_and_comes_back_with_the_next_save(tmp_path: Path, made: list[Nodes]) -> None:
    nodes = Nodes(tmp_path, "2:3", *FLAGS)
    made.append(nodes)
    first = nodes.ranks(0, 3)
    assert {words[1] for words in first} == {"2:3"}
    nodes.lose(0)
    second = nodes.ranks(1, 2)
    nodes.start(0)
    nodes.jobs[0].until("node 1 leads; this node is taken in with the next start, at the next save")
    assert not (nodes.ranks_place / "2.0").exists()
    nodes.let("saves")
    third = nodes.ranks(2, 3)
    assert [[words[0] for words in each] for each in (first, second, third)] == [["3"] * 3, ["2"] * 2, ["3"] * 3]
    assert len({words[2] for words in (*first, *second, *third)}) == 1, "it is one job"
    nodes.let("done")
    assert nodes.wait() == {0: 0, 1: 0, 2: 0}
    assert "node 0 was lost; starting again from the newest durable checkpoint (restart 1 of 99)" in nodes.output
    assert "with the node that has come" in nodes.jobs[1].output
