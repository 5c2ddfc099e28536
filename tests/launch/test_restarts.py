"""A failed job starts again while that makes sense: after deaths and defects, as long as it makes progress."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from megatron.launch import agent, attempt
from megatron.launch.outcome import MAX_FRUITLESS_STARTS, Restarts
from megatron.runtime import progress_file
from tests.helpers.launch_jobs import Job, find_free_port

REDUCE_SCRIPT = """\
import os, signal, sys
import torch, torch.distributed as dist
dist.init_process_group('gloo')
total = torch.ones(1)
dist.all_reduce(total)
start = os.environ['TORCHELASTIC_RESTART_COUNT']
store = dist.TCPStore(os.environ['MASTER_ADDR'], int(os.environ['MASTER_PORT']), is_master=False)
open(f'{sys.argv[1]}/met-{start}.{dist.get_rank()}', 'w').write(str(store.check([f'left/{dist.get_rank()}'])))
store.set(f'left/{dist.get_rank()}', 'by the first start')
if start == '0':
    dist.barrier()
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()
open(f'{sys.argv[1]}/sum-{start}.{dist.get_rank()}', 'w').write(str(total.item()))
dist.destroy_process_group()
"""


def test_restart_follows_death_but_not_config_error(tmp_path):
    died = Job(tmp_path / "died", [["exit:4"]], "--max-restarts", "1")
    assert died.wait() == 4
    assert died.output.count("ended by rank 0") == 2
    assert "restarting like the first start" in died.output and "(restart 1 of 1)" in died.output
    assert "all restarts of --max-restarts 1 are used; the job ends with code 4" in died.output
    config_error = Job(tmp_path / "mistake", [["exit:3"]], "--max-restarts", "2")
    assert config_error.wait() == 3
    assert config_error.output.count("ended by rank 0") == 1


def test_three_starts_without_progress_end_job(tmp_path):
    """Row A25: the first has saved step 5, the others get no further."""
    job = Job(tmp_path, [["tell:5", "raise", "then", "raise"]], "--max-restarts", "9")
    assert job.wait() == 1
    assert job.output.count("restarting from the checkpoint of step 5") == MAX_FRUITLESS_STARTS
    assert "3 consecutive starts ended before a new checkpoint was durable (the newest is of step 5)" in job.output
    assert "See their errors above" in job.output


@pytest.mark.parametrize(
    ("durable_steps", "expected_starts"),
    [
        ([None, None, None, None], 3),
        ([5, 5, 5, 5, 5], 4),
        ([5, 5, 10, 10, 10, 15], 6),
        ([None, None, 5, 5, 5, 5], 6),
        ([5, 3, 3, 3, 4], 4),
        ([5, 3, 3, 4, 3, 4], 6),
        ([1, 2, 3, 4, 5, 6, 7], 7),
    ],
)
def test_progress_requires_step_above_last_durable(durable_steps, expected_starts, tmp_path, monkeypatch):
    restarts = Restarts(6, tmp_path / "progress")
    monkeypatch.setenv(progress_file.PROGRESS_FILE_VARIABLE, str(tmp_path / "progress"))
    num_starts = 0
    for step in durable_steps:
        num_starts += 1
        if step is not None:
            progress_file.report_committed_step(step)
        if restarts.objection(1, is_node_0=True):
            break
        restarts.num_done += 1
    assert num_starts == expected_starts


def test_only_node_0_judges_progress(tmp_path):
    restarts = Restarts(9, tmp_path / "progress")
    assert [restarts.objection(4, is_node_0=False) for _ in range(4)] == [""] * 4


def test_restart_uses_clean_store(tmp_path):
    script = tmp_path / "reduce.py"
    script.write_text(REDUCE_SCRIPT)
    flags = ("--preload", "torch", "--max-restarts", "1")
    job = Job(tmp_path, [[], []], *flags, script=script, arguments=[str(tmp_path)])
    assert job.wait(30) == 0, job.output
    assert [(tmp_path / f"sum-1.{rank}").read_text() for rank in (0, 1)] == ["2.0", "2.0"]
    assert [(tmp_path / f"met-1.{rank}").read_text() for rank in (0, 1)] == ["False", "False"]


def test_multiple_nodes_restart_together(tmp_path):
    flags = ("--nnodes", "2", "--master-port", str(find_free_port()), "--max-restarts", "1", "--preload", "torch")
    script = tmp_path / "reduce.py"
    script.write_text(REDUCE_SCRIPT)
    nodes = [
        Job(tmp_path / str(node), [[]], *flags, "--node-rank", str(node), script=script, arguments=[str(tmp_path)])
        for node in (0, 1)
    ]
    assert [node.wait(30) for node in nodes] == [0, 0], nodes[0].output + nodes[1].output
    assert [(tmp_path / f"sum-1.{rank}").read_text() for rank in (0, 1)] == ["2.0", "2.0"]
    assert all("(restart 1 of 1)" in node.output for node in nodes)


def test_nodes_without_progress_end_together(tmp_path):
    nodes = start_two_nodes(tmp_path, [["leave", "wait"], ["raise"]], "--max-restarts", "9")
    assert [node.wait(30) for node in nodes] == [1, 1]
    for node in nodes:
        assert node.output.count("restarting") == 2
        assert "3 consecutive starts ended before a new checkpoint was durable" in node.output


def test_lost_node_ends_fixed_size_job(tmp_path, monkeypatch):
    for module in (attempt, agent):
        monkeypatch.setattr(module, "NODE_WAIT_S", 0.3)  # the launchers are forked from here
    first, second = start_two_nodes(tmp_path, [["sleep:0.7", "exit:4"], ["leave", "wait"]], "--max-restarts", "9")
    first.wait_for_ranks(2)
    second.send_signal(signal.SIGKILL)
    second.wait()
    assert first.wait(20) == 4
    assert "node 1 did not answer; the job ends with code 4" in first.output


def start_two_nodes(tmp_path: Path, plans: list[list[str]], *flags: str) -> tuple[Job, Job]:
    """Start two nodes with one rank each."""
    shared = tmp_path / "ranks"
    shared.mkdir()
    common = ("--nnodes", "2", "--master-port", str(find_free_port()), *flags)
    return (
        Job(tmp_path / "node0", plans, *common, "--node-rank", "0", nproc_per_node=1, ranks_folder=shared),
        Job(tmp_path / "node1", plans, *common, "--node-rank", "1", nproc_per_node=1, ranks_folder=shared),
    )


@pytest.mark.parametrize(
    ("signal_number", "plan", "code", "message"),
    [
        (signal.SIGUSR1, ["wait"], 75, "nothing was lost: run the same command later"),
        (signal.SIGTERM, ["tell:5", "raise", "then", "wait"], 75, "the checkpoint of step 5 is durable"),
        (signal.SIGTERM, ["raise", "then", "wait"], 143, "the job ends with code 143"),
    ],
)
def test_signal_before_ranks_can_save(signal_number, plan, code, message, tmp_path):
    job = Job(tmp_path, [plan], "--max-restarts", "1")
    job.wait_for_ranks(1)
    if "then" in plan:
        job.wait_for_output("(restart 1 of 1)")
    job.send_signal(signal_number)
    assert job.wait(10) == code
    assert message in job.output
