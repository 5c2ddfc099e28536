"""Ports, and several launchers that form one job."""

from __future__ import annotations

import socket
from pathlib import Path

from tests.helpers.launch_jobs import Job, free_port


def two_nodes(tmp_path: Path, plans: list[list[str]]) -> tuple[Job, Job]:
    shared = tmp_path / "ranks"
    shared.mkdir()
    flags = ("--nnodes", "2", "--master-port", str(free_port()), "--init-timeout", "10")
    return (
        Job(tmp_path / "node0", plans, *flags, "--node-rank", "0", nproc=2, ranks_place=shared),
        Job(tmp_path / "node1", plans, *flags, "--node-rank", "1", nproc=2, ranks_place=shared),
    )


def test_two_launches_on_one_host_form_one_job(tmp_path):
    first, second = two_nodes(tmp_path, [["exit:0"]] * 3 + [["sleep:0.3", "exit:0"]])
    ranks = first.ranks(4)
    assert (first.wait(), second.wait()) == (0, 0)
    assert [rank["env"]["GROUP_RANK"] for rank in ranks] == ["0", "0", "1", "1"]
    assert [rank["env"]["WORLD_SIZE"] for rank in ranks] == ["4"] * 4
    assert len({rank["env"]["MEGATRON_RUN_ID"] for rank in ranks}) == 1


def test_a_failure_on_one_node_ends_both_with_its_code(tmp_path):
    first, second = two_nodes(tmp_path, [["leave", "wait"]] * 3 + [["sleep:0.2", "exit:5"]])
    assert (first.wait(), second.wait()) == (5, 5)
    assert "rank 0 leaves: a peer died: rank 3" in first.output
    assert "ended by rank 3" in first.output
    assert "ended by rank 3" in second.output


def test_a_lost_node_0_ends_the_other_node(tmp_path):
    first, second = two_nodes(tmp_path, [["leave", "wait"]] * 4)
    first.ranks(4)
    first.signal(9)
    first.wait()
    assert second.wait(10) == 4
    assert "node 0 was lost" in second.output


def test_a_port_in_use_is_replaced_by_the_next_free_one(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        job = Job(tmp_path, [["exit:0"]], "--master-port", str(port))
        assert job.wait() == 0
    assert f"port {port} is in use; using " in job.output
    assert job.ranks(1)[0]["env"]["MASTER_PORT"] != str(port)


def test_a_port_in_use_is_an_error_with_several_nodes(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        job = Job(tmp_path, [["exit:0"]], "--master-port", str(port), "--nnodes", "2")
        assert job.wait() == 2
    assert f"MASTER_PORT must be free on node 0, got 127.0.0.1:{port}" in job.output


def test_a_node_0_that_never_answers_is_named(tmp_path):
    port = str(free_port())
    job = Job(
        tmp_path, [["exit:0"]],
        "--nnodes", "2", "--node-rank", "1", "--master-port", port, "--init-timeout", "0.5",
    )  # fmt: skip
    assert job.wait(10) == 4
    assert f"cannot reach 127.0.0.1:{port} after 0.5 s" in job.output
    assert "Start node 0 with" in job.output


def test_a_host_that_does_not_resolve_is_named(tmp_path):
    flags = ("--nnodes", "2", "--node-rank", "1", "--master-addr", "no-such-host.invalid", "--init-timeout", "0.5")
    job = Job(tmp_path, [["exit:0"]], *flags)
    assert job.wait(15) == 4
    assert "cannot reach no-such-host.invalid:" in job.output


def test_a_node_that_never_comes_is_named(tmp_path):
    job = Job(tmp_path, [["exit:0"]], "--nnodes", "2", "--init-timeout", "0.5")
    assert job.wait(10) == 4
    assert "1 of 2 nodes joined within 0.5 s" in job.output
    assert "missing: NODE_RANK 1" in job.output


def test_the_same_node_rank_twice_is_refused(tmp_path):
    flags = ("--nnodes", "3", "--master-port", str(free_port()), "--init-timeout", "2")
    nodes = [Job(tmp_path / str(i), [["exit:0"]], *flags, "--node-rank", str(min(i, 1))) for i in range(3)]
    assert sorted(node.wait() for node in nodes) == [2, 4, 4]
    assert "got NODE_RANK=1 twice" in nodes[1].output + nodes[2].output
