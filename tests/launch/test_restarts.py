"""A failed job starts again while that makes sense: after deaths and defects, as long as it makes progress."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from megatron.launch import agent, attempt
from megatron.launch.outcome import FRUITLESS, Restarts
from megatron.runtime import progress_file
from tests.helpers.launch_jobs import Job, free_port

REDUCE = """\
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


def test_restarts_follow_a_death_but_not_a_users_mistake(tmp_path):
    died = Job(tmp_path / "died", [["exit:4"]], "--max-restarts", "1")
    assert died.wait() == 4
    assert died.output.count("ended by rank 0") == 2
    assert "restarting like the first start" in died.output and "(restart 1 of 1)" in died.output
    assert "all restarts of --max-restarts 1 are used; the job ends with code 4" in died.output
    mistake = Job(tmp_path / "mistake", [["exit:3"]], "--max-restarts", "2")
    assert mistake.wait() == 3
    assert mistake.output.count("ended by rank 0") == 1


def test_three_starts_without_progress_end_the_job(tmp_path):
    """Row A25: the first has saved step 5, the others get no further."""
    job = Job(tmp_path, [["tell:5", "raise", "then", "raise"]], "--max-restarts", "9")
    assert job.wait() == 1
    assert job.output.count("restarting from the checkpoint of step 5") == FRUITLESS
    assert "3 consecutive starts ended before a new checkpoint was durable (the newest is of step 5)" in job.output
    assert "See their errors above" in job.output


@pytest.mark.parametrize(
    ("durable", "starts"),
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
def test_progress_is_a_step_above_the_last_one_also_after_a_way_back(durable, starts, tmp_path, monkeypatch):
    restarts = Restarts(6, tmp_path / "progress")
    monkeypatch.setenv(progress_file.PROGRESS_FILE_VARIABLE, str(tmp_path / "progress"))
    done = 0
    for step in durable:
        done += 1
        if step is not None:
            progress_file.note_committed_step(step)
        if restarts.against(1, is_node_0=True):
            break
        restarts.done += 1
    assert done == starts


def test_only_node_0_judges_progress(tmp_path):
    restarts = Restarts(9, tmp_path / "progress")
    assert [restarts.against(4, is_node_0=False) for _ in range(4)] == [""] * 4


def test_a_restart_meets_nothing_that_the_dead_ranks_left_in_the_store(tmp_path):
    script = tmp_path / "reduce.py"
    script.write_text(REDUCE)
    flags = ("--preload", "torch", "--max-restarts", "1")
    job = Job(tmp_path, [[], []], *flags, script=script, arguments=[str(tmp_path)])
    assert job.wait(30) == 0, job.output
    assert [(tmp_path / f"sum-1.{rank}").read_text() for rank in (0, 1)] == ["2.0", "2.0"]
    assert [(tmp_path / f"met-1.{rank}").read_text() for rank in (0, 1)] == ["False", "False"]


def test_several_nodes_start_again_together(tmp_path):
    flags = ("--nnodes", "2", "--master-port", str(free_port()), "--max-restarts", "1", "--preload", "torch")
    script = tmp_path / "reduce.py"
    script.write_text(REDUCE)
    nodes = [
        Job(tmp_path / str(node), [[]], *flags, "--node-rank", str(node), script=script, arguments=[str(tmp_path)])
        for node in (0, 1)
    ]
    assert [node.wait(30) for node in nodes] == [0, 0], nodes[0].output + nodes[1].output
    assert [(tmp_path / f"sum-1.{rank}").read_text() for rank in (0, 1)] == ["2.0", "2.0"]
    assert all("(restart 1 of 1)" in node.output for node in nodes)


def test_nodes_without_progress_end_together_and_say_why(tmp_path):
    nodes = two_nodes(tmp_path, [["leave", "wait"], ["raise"]], "--max-restarts", "9")
    assert [node.wait(30) for node in nodes] == [1, 1]
    for node in nodes:
        assert node.output.count("restarting") == 2
        assert "3 consecutive starts ended before a new checkpoint was durable" in node.output


def test_a_lost_node_ends_the_job_instead_of_starting_it_again(tmp_path, monkeypatch):
    for module in (attempt, agent):
        monkeypatch.setattr(module, "MEET_S", 0.3)  # the launchers are forked from here
    first, second = two_nodes(tmp_path, [["sleep:0.7", "exit:4"], ["leave", "wait"]], "--max-restarts", "9")
    first.ranks(2)
    second.signal(signal.SIGKILL)
    second.wait()
    assert first.wait(20) == 4
    assert "node 1 did not answer; the job ends with code 4" in first.output


def two_nodes(tmp_path: Path, plans: list[list[str]], *flags: str) -> tuple[Job, Job]:
    """Start two nodes with one rank each."""
    shared = tmp_path / "ranks"
    shared.mkdir()
    common = ("--nnodes", "2", "--master-port", str(free_port()), *flags)
    return (
        Job(tmp_path / "node0", plans, *common, "--node-rank", "0", nproc=1, ranks_place=shared),
        Job(tmp_path / "node1", plans, *common, "--node-rank", "1", nproc=1, ranks_place=shared),
    )


@pytest.mark.parametrize(
    ("number", "plan", "code", "message"),
    [
        (signal.SIGUSR1, ["wait"], 75, "nothing was lost: run the same command later"),
        (signal.SIGTERM, ["tell:5", "raise", "then", "wait"], 75, "the checkpoint of step 5 is durable"),
        (signal.SIGTERM, ["raise", "then", "wait"], 143, "the job ends with code 143"),
    ],
)
def test_a_signal_before_the_ranks_can_save(number, plan, code, message, tmp_path):
    job = Job(tmp_path, [plan], "--max-restarts", "1")
    job.ranks(1)
    if "then" in plan:
        job.until("(restart 1 of 1)")
    job.signal(number)
    assert job.wait(10) == code
    assert message in job.output
