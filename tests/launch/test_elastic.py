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
from megatron.launch.control import from_ranges, to_ranges
from megatron.launch.elastic import ALL_LEFT, VERDICTS, broadcast_entries
from megatron.launch.options import parse
from megatron.launch.outcome import Exit, parse_exits
from tests.helpers.elastic_jobs import ElasticNodes

FLAGS = ("--preload", "torch", "--node-timeout", "3", "--init-timeout", "4")


@pytest.fixture
def started_jobs() -> Iterator[list[ElasticNodes]]:
    """Jobs whose launchers are ended, whatever becomes of the test."""
    jobs: list[ElasticNodes] = []
    yield jobs
    for job in jobs:
        job.kill()


def test_lost_leader_rejoins_after_next_save(tmp_path: Path, started_jobs: list[ElasticNodes]) -> None:
    nodes = ElasticNodes(tmp_path, "2:3", *FLAGS)
    started_jobs.append(nodes)
    first = nodes.wait_for_ranks(0, 3)
    assert {words[1] for words in first} == {"2:3"}
    nodes.kill_nodes(0)
    second = nodes.wait_for_ranks(1, 2)
    nodes.start(0)
    nodes.jobs[0].wait_for_output("node 1 is the leader; this node joins with the next start, after the next save")
    assert not (nodes.ranks_folder / "2.0").exists()
    nodes.write_file("saves")
    third = nodes.wait_for_ranks(2, 3)
    assert [[words[0] for words in start_words] for start_words in (first, second, third)] == [
        ["3"] * 3,
        ["2"] * 2,
        ["3"] * 3,
    ]
    assert len({words[2] for words in (*first, *second, *third)}) == 1, "it is one job"
    nodes.write_file("done")
    assert nodes.wait() == {0: 0, 1: 0, 2: 0}
    assert "node 0 was lost; restarting from the newest durable checkpoint (restart 1 of 99)" in nodes.output
    assert "with the node that joined" in nodes.jobs[1].output


@pytest.mark.slow
def test_job_survives_simultaneous_loss_of_leader_and_node(tmp_path: Path, started_jobs: list[ElasticNodes]) -> None:
    nodes = ElasticNodes(tmp_path, "1:3", *FLAGS)
    started_jobs.append(nodes)
    nodes.wait_for_ranks(0, 3)
    nodes.kill_nodes(0, 1)
    assert nodes.wait_for_ranks(1, 1)[0][0] == "1"
    nodes.write_file("saves")
    nodes.start(1)
    assert [words[0] for words in nodes.wait_for_ranks(2, 2)] == ["2", "2"]
    nodes.kill_nodes(2)  # which has led since
    assert nodes.wait_for_ranks(3, 1)[0][0] == "1"
    nodes.write_file("done")
    assert nodes.wait() == {1: 0}


@pytest.mark.slow
def test_lost_follower_is_not_reported_as_rank_failure(tmp_path: Path, started_jobs: list[ElasticNodes]) -> None:
    nodes = ElasticNodes(tmp_path, "2:3", *FLAGS)
    started_jobs.append(nodes)
    nodes.wait_for_ranks(0, 3)
    nodes.kill_nodes(1)
    nodes.wait_for_ranks(1, 2)
    nodes.write_file("done", "5")
    assert nodes.wait() == {0: 5, 2: 5}
    assert nodes.output.count("node 1 was lost") == 2
    assert "the job ends with code 5" in nodes.output


@pytest.mark.slow
def test_fewer_than_min_nodes_exit_4_with_advice(tmp_path: Path, started_jobs: list[ElasticNodes]) -> None:
    nodes = ElasticNodes(tmp_path, "2:3", *FLAGS)
    started_jobs.append(nodes)
    nodes.wait_for_ranks(0, 3)
    nodes.kill_nodes(0, 2)
    assert nodes.wait() == {1: 4}
    assert "1 of at least 2 nodes joined within 4 s; missing: NODE_RANK 0, 2" in nodes.output
    assert "lower MIN of --nnodes MIN:MAX; with --resume" in nodes.output


@pytest.mark.slow
def test_job_below_min_continues_if_node_joins_in_time(tmp_path: Path, started_jobs: list[ElasticNodes]) -> None:
    nodes = ElasticNodes(tmp_path, "2:2", *FLAGS)
    started_jobs.append(nodes)
    nodes.wait_for_ranks(0, 2)
    nodes.kill_nodes(0)
    nodes.start(0)
    assert [words[0] for words in nodes.wait_for_ranks(1, 2)] == ["2", "2"]
    nodes.write_file("done")
    assert nodes.wait() == {0: 0, 1: 0}


@pytest.mark.slow
def test_first_start_waits_for_all_nodes_then_uses_min(tmp_path: Path, started_jobs: list[ElasticNodes]) -> None:
    nodes = ElasticNodes(tmp_path, "1:3", "--preload", "torch", "--init-timeout", "2", started_nodes=[1, 2])
    started_jobs.append(nodes)
    assert [words[0] for words in nodes.wait_for_ranks(0, 2)] == ["2", "2"]
    nodes.write_file("done")
    assert nodes.wait() == {1: 0, 2: 0}


@pytest.mark.slow
@pytest.mark.parametrize("role", ["leader", "follower"])
def test_briefly_stopped_host_is_not_lost(role: str, tmp_path: Path, started_jobs: list[ElasticNodes]) -> None:
    """Its processes are stopped for two thirds of --node-timeout, and one that is stopped for longer is lost."""
    nodes = ElasticNodes(tmp_path, "1:2", *FLAGS)
    started_jobs.append(nodes)
    pids = [int(words[4]) for words in nodes.wait_for_ranks(0, 2)]
    node = 0 if role == "leader" else 1
    stopped = [nodes.jobs[node].pid, pids[node]]
    for pid in stopped:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(2)
    for pid in stopped:
        os.kill(pid, signal.SIGCONT)
    time.sleep(2)
    assert "lost" not in nodes.output
    assert not (nodes.ranks_folder / "1.0").exists()
    for pid in stopped:
        os.kill(pid, signal.SIGSTOP)
    assert nodes.wait_for_ranks(1, 1)[0][0] == "1"
    for pid in reversed(stopped):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
    nodes.jobs[node].wait_for_output("this node joins with the next start")
    nodes.write_file("saves")
    nodes.wait_for_ranks(2, 2)
    nodes.write_file("done")
    assert nodes.wait() == {0: 0, 1: 0}


@pytest.mark.slow
def test_finished_job_releases_waiting_nodes(tmp_path: Path, started_jobs: list[ElasticNodes]) -> None:
    nodes = ElasticNodes(tmp_path, "1:2", *FLAGS)
    started_jobs.append(nodes)
    nodes.wait_for_ranks(0, 2)
    nodes.kill_nodes(1)
    nodes.wait_for_ranks(1, 1)
    nodes.start(1)
    nodes.jobs[1].wait_for_output("node 0 is the leader")
    nodes.write_file("done")
    assert nodes.wait() == {0: 0, 1: 0}
    assert "the job has ended with code 0" in nodes.jobs[1].output


@pytest.mark.slow
def test_stop_request_ends_job_despite_waiting_node(tmp_path: Path, started_jobs: list[ElasticNodes]) -> None:
    nodes = ElasticNodes(tmp_path, "1:2", *FLAGS)
    started_jobs.append(nodes)
    nodes.wait_for_ranks(0, 2)
    nodes.kill_nodes(1)
    nodes.wait_for_ranks(1, 1)
    nodes.start(1)
    nodes.jobs[1].wait_for_output("node 0 is the leader")
    nodes.write_file("done", "75")
    assert nodes.wait() == {0: 75, 1: 75}
    assert not (nodes.ranks_folder / "2.0").exists()


@pytest.mark.slow
def test_mismatched_flags_and_duplicate_node_rank_raise(tmp_path: Path, started_jobs: list[ElasticNodes]) -> None:
    nodes = ElasticNodes(tmp_path, "1:2", "--preload", "torch", "--init-timeout", "3", started_nodes=[0])
    started_jobs.append(nodes)
    nodes.wait_for_ranks(0, 1)
    other = nodes.start(1, "--nproc-per-node", "2")
    assert other.wait() == 2
    assert "every node needs the same --nnodes, --nproc-per-node and --node-list, but those of node 1" in other.output
    second = nodes.start(0)
    assert second.wait() == 2
    assert "the port of this node's entry in --node-list must be free, got" in second.output


@pytest.mark.slow
def test_restarts_are_counted_across_leaders(tmp_path: Path, started_jobs: list[ElasticNodes]) -> None:
    nodes = ElasticNodes(tmp_path, "1:3", *FLAGS, max_restarts=1)
    started_jobs.append(nodes)
    nodes.wait_for_ranks(0, 3)
    nodes.kill_nodes(0)
    nodes.wait_for_ranks(1, 2)
    nodes.kill_nodes(1)
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
def test_invalid_options_raise_before_start(flags: str, message: str) -> None:
    with pytest.raises(ConfigError) as exc_info:
        parse(["--max-restarts", "1", "--nproc-per-node", "1", *flags.split(), __file__], {})
    assert message in str(exc_info.value)


def test_node_list_has_ports_and_is_read_from_environment() -> None:
    flags = ["--nnodes", "1:3", "--max-restarts", "1", "--master-port", "7", __file__]
    options = parse(flags, {"NODE_LIST": "a, b:8,[::1]:9", "DS_ACCELERATOR": "cpu"})
    assert options.node_list == (("a", 7), ("b", 8), ("::1", 9))
    assert (options.min_nodes, options.nnodes, options.is_elastic) == (1, 3, True)


@pytest.mark.slow
def test_waiting_node_continues_when_all_others_are_lost(tmp_path: Path, started_jobs: list[ElasticNodes]) -> None:
    nodes = ElasticNodes(tmp_path, "1:3", *FLAGS)
    started_jobs.append(nodes)
    name = nodes.wait_for_ranks(0, 3)[0][2]
    nodes.kill_nodes(0)
    nodes.wait_for_ranks(1, 2)
    nodes.start(0)
    nodes.jobs[0].wait_for_output("is the leader; this node joins")
    nodes.kill_nodes(1, 2)
    assert nodes.wait_for_ranks(2, 1)[0][2] == name, "it is the same job, in its next start"
    nodes.write_file("done")
    assert nodes.wait() == {0: 0}


@pytest.mark.slow
def test_returning_leader_does_not_lead_unknown_job(tmp_path: Path, started_jobs: list[ElasticNodes]) -> None:
    nodes = ElasticNodes(tmp_path, "2:3", *FLAGS)
    started_jobs.append(nodes)
    nodes.wait_for_ranks(0, 3)
    nodes.write_file("saves")
    nodes.kill_nodes(0)
    nodes.start(0)
    nodes.wait_until(lambda: "has 3 of 3 nodes" in nodes.jobs[0].output, "the node")
    nodes.write_file("done")
    assert nodes.wait() == {0: 0, 1: 0, 2: 0}


def test_leader_broadcasts_results_of_node_entries() -> None:
    control = mock.Mock(
        start_nodes=[0, 1, 2],
        num_entries=Counter(),
        last_broadcast="",
        last_broadcast_at=0.0,
        set_local=lambda *entry: store_entry(*entry),
        lost_nodes=lambda: [2] if "lost/2" in table else [],
    )
    table: dict[str, str] = {}
    control.get = table.get

    def store_entry(key: str, value: str) -> None:
        control.num_entries[key.partition("/")[0]] += key not in table
        table[key] = value

    def enter(key: str, value: str) -> dict[str, str]:
        store_entry(key, value)
        updates = broadcast_entries(control, key, value)
        table.update(updates)
        return updates

    assert enter("failed", "1") == {"failed": "1"} and enter("restart/1", "") == {} and enter("gone/1", "1") == {}
    assert enter("left/0", "4") == {}
    assert enter("left/2", "0") == {}
    assert enter("lost/2", "1") == {"lost/2": "1"}  # three entries, of two nodes
    first, worse = (Exit(rank=rank, pid=1, status=status, time_s=0.5) for rank, status in ((3, 4), (5, -9)))
    assert parse_exits(enter("verdict/0", json.dumps(asdict(first)))[VERDICTS]) == [first]
    assert enter("verdict/1", json.dumps(asdict(worse))) == {}  # so soon after the last word
    updates = enter("left/1", "75")
    assert (
        list(updates) == [VERDICTS, ALL_LEFT] and updates[ALL_LEFT] == "75" and worse in parse_exits(updates[VERDICTS])
    )
    control.last_broadcast_at -= 1
    assert enter("verdict/1", json.dumps(asdict(first))) == {}  # nothing new


def test_node_lists_round_trip_as_ranges() -> None:
    for nodes in ([], [3], [0, 1, 2], [7, 0, 1, 5, 6], [2, 1, 0]):
        assert from_ranges(to_ranges(nodes)) == nodes
    assert to_ranges(range(1250)) == [[0, 1249]]
