"""Ports, and several launchers that form one job."""

from __future__ import annotations

import socket
from pathlib import Path

from tests.helpers.launch_jobs import Job, find_free_port


def start_two_nodes(tmp_path: Path, plans: list[list[str]]) -> tuple[Job, Job]:
    shared = tmp_path / "ranks"
    shared.mkdir()
    flags = ("--nnodes", "2", "--master-port", str(find_free_port()), "--init-timeout", "10")
    return (
        Job(tmp_path / "node0", plans, *flags, "--node-rank", "0", nproc_per_node=2, ranks_folder=shared),
        Job(tmp_path / "node1", plans, *flags, "--node-rank", "1", nproc_per_node=2, ranks_folder=shared),
    )


def test_two_launchers_on_one_host_form_one_job(tmp_path):
    first, second = start_two_nodes(tmp_path, [["exit:0"]] * 3 + [["sleep:0.3", "exit:0"]])
    ranks = first.wait_for_ranks(4)
    assert (first.wait(), second.wait()) == (0, 0)
    assert [rank["env"]["GROUP_RANK"] for rank in ranks] == ["0", "0", "1", "1"]
    assert [rank["env"]["WORLD_SIZE"] for rank in ranks] == ["4"] * 4
    assert len({rank["env"]["MEGATRON_RUN_ID"] for rank in ranks}) == 1


def test_failure_on_one_node_ends_both(tmp_path):
    first, second = start_two_nodes(tmp_path, [["leave", "wait"]] * 3 + [["sleep:0.2", "exit:5"]])
    assert (first.wait(), second.wait()) == (5, 5)
    assert "rank 0 leaves: a peer died: rank 3" in first.output
    assert "ended by rank 3" in first.output
    assert "ended by rank 3" in second.output


def test_lost_node_0_ends_other_node(tmp_path):
    first, second = start_two_nodes(tmp_path, [["leave", "wait"]] * 4)
    first.wait_for_ranks(4)
    first.send_signal(9)
    first.wait()
    assert second.wait(10) == 4
    assert "node 0 was lost" in second.output


def test_port_in_use_is_replaced_by_free_port(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        job = Job(tmp_path, [["exit:0"]], "--master-port", str(port))
        assert job.wait() == 0
    assert f"port {port} is in use; using " in job.output
    assert job.wait_for_ranks(1)[0]["env"]["MASTER_PORT"] != str(port)


def test_port_in_use_raises_with_multiple_nodes(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        job = Job(tmp_path, [["exit:0"]], "--master-port", str(port), "--nnodes", "2")
        assert job.wait() == 2
    assert f"MASTER_PORT must be free on node 0, got 127.0.0.1:{port}" in job.output


def test_unreachable_node_0_is_reported(tmp_path):
    port = str(find_free_port())
    job = Job(
        tmp_path, [["exit:0"]],
        "--nnodes", "2", "--node-rank", "1", "--master-port", port, "--init-timeout", "0.5",
    )  # fmt: skip
    assert job.wait(10) == 4
    assert f"cannot reach 127.0.0.1:{port} after 0.5 s" in job.output
    assert "Start node 0 with" in job.output


def test_unresolvable_host_is_reported(tmp_path):
    flags = ("--nnodes", "2", "--node-rank", "1", "--master-addr", "no-such-host.invalid", "--init-timeout", "0.5")
    job = Job(tmp_path, [["exit:0"]], *flags)
    assert job.wait(15) == 4
    assert "cannot reach no-such-host.invalid:" in job.output


def test_missing_node_is_reported(tmp_path):
    job = Job(tmp_path, [["exit:0"]], "--nnodes", "2", "--init-timeout", "0.5")
    assert job.wait(10) == 4
    assert "1 of 2 nodes joined within 0.5 s" in job.output
    assert "missing: NODE_RANK 1" in job.output


def test_duplicate_node_rank_raises(tmp_path):
    flags = ("--nnodes", "3", "--master-port", str(find_free_port()), "--init-timeout", "2")
    nodes = [Job(tmp_path / str(i), [["exit:0"]], *flags, "--node-rank", str(min(i, 1))) for i in range(3)]
    assert sorted(node.wait() for node in nodes) == [2, 4, 4]
    assert "got NODE_RANK=1 twice" in nodes[1].output + nodes[2].output
