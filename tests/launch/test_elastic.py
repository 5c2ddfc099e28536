"""Launchers of an elastic job: nodes are lost and come back, also the one that leads."""

from __future__ import annotations

import json
import os
import signal
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from unittest import mock

import pytest

from megatron.errors import ConfigError
from megatron.launch.control import from_runs, in_runs
from megatron.launch.elastic import ALL_LEFT, VERDICTS, heard_by_all
from megatron.launch.options import parse
from megatron.launch.outcome import Exit, exits_of
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
    nodes.jobs[0].until("node 1 is the leader; this node joins with the next start, after the next save")
    assert not (nodes.ranks_place / "2.0").exists()
    nodes.let("saves")
    third = nodes.ranks(2, 3)
    assert [[words[0] for words in each] for each in (first, second, third)] == [["3"] * 3, ["2"] * 2, ["3"] * 3]
    assert len({words[2] for words in (*first, *second, *third)}) == 1, "it is one job"
    nodes.let("done")
    assert nodes.wait() == {0: 0, 1: 0, 2: 0}
    assert "node 0 was lost; restarting from the newest durable checkpoint (restart 1 of 99)" in nodes.output
    assert "with the node that joined" in nodes.jobs[1].output


@pytest.mark.slow
def test_two_nodes_are_lost_at_once_with_the_leader_among_them(tmp_path: Path, made: list[Nodes]) -> None:
    nodes = Nodes(tmp_path, "1:3", *FLAGS)
    made.append(nodes)
    nodes.ranks(0, 3)
    nodes.lose(0, 1)
    assert nodes.ranks(1, 1)[0][0] == "1"
    nodes.let("saves")
    nodes.start(1)
    assert [words[0] for words in nodes.ranks(2, 2)] == ["2", "2"]
    nodes.lose(2)  # which has led since
    assert nodes.ranks(3, 1)[0][0] == "1"
    nodes.let("done")
    assert nodes.wait() == {1: 0}


@pytest.mark.slow
def test_a_follower_is_lost_and_its_rank_is_no_reason_of_its_own(tmp_path: Path, made: list[Nodes]) -> None:
    nodes = Nodes(tmp_path, "2:3", *FLAGS)
    made.append(nodes)
    nodes.ranks(0, 3)
    nodes.lose(1)
    nodes.ranks(1, 2)
    nodes.let("done", "5")
    assert nodes.wait() == {0: 5, 2: 5}
    assert nodes.output.count("node 1 was lost") == 2
    assert "the job ends with code 5" in nodes.output


@pytest.mark.slow
def test_fewer_than_min_end_with_4_and_say_what_to_do(tmp_path: Path, made: list[Nodes]) -> None:
    nodes = Nodes(tmp_path, "2:3", *FLAGS)
    made.append(nodes)
    nodes.ranks(0, 3)
    nodes.lose(0, 2)
    assert nodes.wait() == {1: 4}
    assert "1 of at least 2 nodes joined within 4 s; missing: NODE_RANK 0, 2" in nodes.output
    assert "lower MIN of --nnodes MIN:MAX; with --resume" in nodes.output


@pytest.mark.slow
def test_a_job_that_is_short_of_nodes_goes_on_when_one_comes_in_time(tmp_path: Path, made: list[Nodes]) -> None:
    nodes = Nodes(tmp_path, "2:2", *FLAGS)
    made.append(nodes)
    nodes.ranks(0, 2)
    nodes.lose(0)
    nodes.start(0)
    assert [words[0] for words in nodes.ranks(1, 2)] == ["2", "2"]
    nodes.let("done")
    assert nodes.wait() == {0: 0, 1: 0}


@pytest.mark.slow
def test_the_first_start_waits_for_all_and_then_begins_with_min(tmp_path: Path, made: list[Nodes]) -> None:
    nodes = Nodes(tmp_path, "1:3", "--preload", "torch", "--init-timeout", "2", started=[1, 2])
    made.append(nodes)
    assert [words[0] for words in nodes.ranks(0, 2)] == ["2", "2"]
    nodes.let("done")
    assert nodes.wait() == {1: 0, 2: 0}


@pytest.mark.slow
@pytest.mark.parametrize("who", ["leader", "follower"])
def test_a_host_that_stands_still_for_a_moment_is_not_lost(who: str, tmp_path: Path, made: list[Nodes]) -> None:
    """Its processes are stopped for two thirds of --node-timeout, and one that is stopped for longer is lost."""
    nodes = Nodes(tmp_path, "1:2", *FLAGS)
    made.append(nodes)
    pids = [int(words[4]) for words in nodes.ranks(0, 2)]
    node = 0 if who == "leader" else 1
    stopped = [nodes.jobs[node].pid, pids[node]]
    for pid in stopped:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(2)
    for pid in stopped:
        os.kill(pid, signal.SIGCONT)
    time.sleep(2)
    assert "lost" not in nodes.output
    assert not (nodes.ranks_place / "1.0").exists()
    for pid in stopped:
        os.kill(pid, signal.SIGSTOP)
    assert nodes.ranks(1, 1)[0][0] == "1"
    for pid in reversed(stopped):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
    nodes.jobs[node].until("this node joins with the next start")
    nodes.let("saves")
    nodes.ranks(2, 2)
    nodes.let("done")
    assert nodes.wait() == {0: 0, 1: 0}


@pytest.mark.slow
def test_a_job_that_ends_lets_the_nodes_that_wait_go(tmp_path: Path, made: list[Nodes]) -> None:
    nodes = Nodes(tmp_path, "1:2", *FLAGS)
    made.append(nodes)
    nodes.ranks(0, 2)
    nodes.lose(1)
    nodes.ranks(1, 1)
    nodes.start(1)
    nodes.jobs[1].until("node 0 leads")
    nodes.let("done")
    assert nodes.wait() == {0: 0, 1: 0}
    assert "the job has ended with code 0" in nodes.jobs[1].output


@pytest.mark.slow
def test_ranks_that_stop_for_another_reason_end_the_job_though_a_node_waits(tmp_path: Path, made: list[Nodes]) -> None:
    nodes = Nodes(tmp_path, "1:2", *FLAGS)
    made.append(nodes)
    nodes.ranks(0, 2)
    nodes.lose(1)
    nodes.ranks(1, 1)
    nodes.start(1)
    nodes.jobs[1].until("node 0 leads")
    nodes.let("done", "75")
    assert nodes.wait() == {0: 75, 1: 75}
    assert not (nodes.ranks_place / "2.0").exists()


@pytest.mark.slow
def test_nodes_with_other_flags_and_a_second_node_of_a_number_are_refused(tmp_path: Path, made: list[Nodes]) -> None:
    nodes = Nodes(tmp_path, "1:2", "--preload", "torch", "--init-timeout", "3", started=[0])
    made.append(nodes)
    nodes.ranks(0, 1)
    other = nodes.start(1, "--nproc-per-node", "2")
    assert other.wait() == 2
    assert "every node needs the same --nnodes, --nproc-per-node and --node-list, but those of node 1" in other.output
    second = nodes.start(0)
    assert second.wait() == 2
    assert "the port of this node's entry in --node-list must be free, got" in second.output


@pytest.mark.slow
def test_restarts_are_counted_over_all_leaders_and_used_up(tmp_path: Path, made: list[Nodes]) -> None:
    nodes = Nodes(tmp_path, "1:3", *FLAGS, restarts=1)
    made.append(nodes)
    nodes.ranks(0, 3)
    nodes.lose(0)
    nodes.ranks(1, 2)
    nodes.lose(1)
    assert nodes.wait() == {2: 4}
    assert "node 1 was lost; all restarts of --max-restarts 1 are used" in nodes.output


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--nnodes 3:2 --node-list a,b", "--nnodes MIN:MAX needs 1 <= MIN <= MAX, got 3:2."),
        ("--nnodes 1:3 --node-list a,b", "needs --node-list (or NODE_LIST) with an entry HOST[:PORT] for each of"),
        ("--nnodes 1:2 --node-list a,a", "each node needs its own entry in --node-list, got a:29500 2 times."),
        ("--nnodes 1:2 --node-list a:x,b", "HOST or HOST:PORT with a port of 1 to 65535, got a:0."),
        ("--nnodes 1:2 --node-list a,b --node-timeout 1", "--node-timeout must be at least 2 seconds, got 1."),
        (
            "--nnodes 1:2 --node-list a,b --max-restarts 0",
            "needs --max-restarts N to restart after a lost node",
        ),
        ("--nnodes two", "--nnodes must be a number, or MIN:MAX as in 6:8, got 'two'."),
        ("--nnodes 1:2 --node-list a,b --node-rank 2", "--node-rank must be below --nnodes"),
    ],
)
def test_what_cannot_be_is_refused_ahead_of_any_start(flags: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse(["--max-restarts", "1", "--nproc-per-node", "1", *flags.split(), __file__], {})
    assert message in str(error.value)


def test_the_list_of_nodes_has_ports_and_comes_from_the_environment_too() -> None:
    flags = ["--nnodes", "1:3", "--max-restarts", "1", "--master-port", "7", __file__]
    found = parse(flags, {"NODE_LIST": "a, b:8,[::1]:9", "DS_ACCELERATOR": "cpu"})
    assert found.node_list == (("a", 7), ("b", 8), ("::1", 9))
    assert (found.fewest_nodes, found.nnodes, found.is_elastic) == (1, 3, True)


@pytest.mark.slow
def test_a_node_that_waits_goes_on_with_the_job_when_all_others_are_lost(tmp_path: Path, made: list[Nodes]) -> None:
    nodes = Nodes(tmp_path, "1:3", *FLAGS)
    made.append(nodes)
    name = nodes.ranks(0, 3)[0][2]
    nodes.lose(0)
    nodes.ranks(1, 2)
    nodes.start(0)
    nodes.jobs[0].until("is the leader; this node joins")
    nodes.lose(1, 2)
    assert nodes.ranks(2, 1)[0][2] == name, "it is the same job, in its next start"
    nodes.let("done")
    assert nodes.wait() == {0: 0}


@pytest.mark.slow
def test_a_node_that_comes_back_at_once_does_not_lead_a_job_that_it_does_not_know(
    tmp_path: Path, made: list[Nodes]
) -> None:
    nodes = Nodes(tmp_path, "2:3", *FLAGS)
    made.append(nodes)
    nodes.ranks(0, 3)
    nodes.let("saves")
    nodes.lose(0)
    nodes.start(0)
    nodes.until(lambda: "has 3 of 3 nodes" in nodes.jobs[0].output, "the node")
    nodes.let("done")
    assert nodes.wait() == {0: 0, 1: 0, 2: 0}


def test_the_leader_tells_all_nodes_what_follows_from_what_each_says() -> None:
    control = mock.Mock(
        round=[0, 1, 2],
        entries=Counter(),
        passed_on="",
        passed_on_at=0.0,
        keep=lambda *entry: keep(*entry),
        lost=lambda: [2] if "lost/2" in table else [],
    )
    table: dict[str, str] = {}
    control.get = table.get

    def keep(key: str, value: str) -> None:
        control.entries[key.partition("/")[0]] += key not in table
        table[key] = value

    def enter(key: str, value: str) -> dict[str, str]:
        keep(key, value)
        found = heard_by_all(control, key, value)
        table.update(found)
        return found

    assert enter("failed", "1") == {"failed": "1"} and enter("restart/1", "") == {} and enter("gone/1", "1") == {}
    assert enter("left/0", "4") == {}
    assert enter("left/2", "0") == {}
    assert enter("lost/2", "1") == {"lost/2": "1"}  # three entries, of two nodes
    first, worse = (Exit(rank=rank, pid=1, status=status, at=0.5) for rank, status in ((3, 4), (5, -9)))
    assert exits_of(enter("verdict/0", json.dumps(asdict(first)))[VERDICTS]) == [first]
    assert enter("verdict/1", json.dumps(asdict(worse))) == {}  # so soon after the last word
    heard = enter("left/1", "75")
    assert list(heard) == [VERDICTS, ALL_LEFT] and heard[ALL_LEFT] == "75" and worse in exits_of(heard[VERDICTS])
    control.passed_on_at -= 1
    assert enter("verdict/1", json.dumps(asdict(first))) == {}  # nothing new


def test_nodes_travel_in_runs() -> None:
    for nodes in ([], [3], [0, 1, 2], [7, 0, 1, 5, 6], [2, 1, 0]):
        assert from_runs(in_runs(nodes)) == nodes
    assert in_runs(range(1250)) == [[0, 1249]]
