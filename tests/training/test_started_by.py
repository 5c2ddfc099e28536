"""Whoever starts the ranks, each knows which it is; what is said by half is told."""

from __future__ import annotations

import pytest

from megatron.training.started_by import STARTERS, adopt

TORCH = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
HOME = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
OPEN_MPI = STARTERS[0].variables


def said(starter: int, *numbers: str) -> dict[str, str]:
    return dict(zip(STARTERS[starter].variables, numbers, strict=False))


@pytest.mark.parametrize("starter", range(len(STARTERS)), ids=[each.name for each in STARTERS])
def test_the_ranks_of_every_program_meet_on_their_host_or_where_the_user_says(starter: int) -> None:
    env = said(starter, "1", "2", "1", "2")
    assert adopt(env) == [] and env == said(starter, "1", "2", "1", "2") | TORCH | HOME
    spread = said(starter, "3", "4", "1", "2") | {"MASTER_ADDR": "node0", "MASTER_PORT": "7"}
    assert adopt(spread) == []
    assert {name: spread[name] for name in TORCH} == dict(zip(TORCH, "3412", strict=True))
    assert (spread["MASTER_ADDR"], spread["MASTER_PORT"]) == ("node0", "7")
    lost = said(starter, "3", "4", "1", "2")
    told = f"got no MASTER_ADDR, WORLD_SIZE=4 and 2 ranks on this host. Say it: {STARTERS[starter].hand_over}"
    assert [told in problem for problem in adopt(lost)] == [True]


def test_slurms_tasks_of_each_node_are_counted_and_what_is_no_step_is_alone() -> None:
    env = said(2, "5", "8", "1", "4(x2)") | {"MASTER_ADDR": "n0"}
    assert adopt(env) == [] and (env.get("LOCAL_WORLD_SIZE"), env.get("RANK")) == ("4", "5")
    batch = {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "8"}
    assert adopt(batch) == [] and "RANK" not in batch


@pytest.mark.parametrize("alone", [{}, {"WORLD_SIZE": "1"}, said(0, "0", "1"), said(3, "0", "1")], ids=range(4))
def test_a_process_alone_stays_alone(alone: dict[str, str]) -> None:
    env = dict(alone)
    assert adopt(env) == [] and env == alone


def test_what_torchrun_says_counts_ahead_of_what_started_torchrun() -> None:
    env = TORCH | {"MASTER_ADDR": "n0", "MASTER_PORT": "7"} | said(0, "0", "4", "0", "1") | said(2, "0", "2", "0", "1")
    before = dict(env)
    assert adopt(env) == [] and env == before
    of_kubernetes = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "gpt2-0", "MASTER_PORT": "23456"}
    assert adopt(dict(of_kubernetes)) == []


@pytest.mark.parametrize(
    ("env", "told"),
    [
        ({"RANK": "0"}, "must say RANK and WORLD_SIZE, got RANK=0 without WORLD_SIZE. Start the ranks by torchrun"),
        ({"WORLD_SIZE": "4"}, "WORLD_SIZE=4 needs RANK, which of them this process is, got none"),
        ({"RANK": "x", "WORLD_SIZE": "2"}, "RANK must be a whole number, got RANK='x'"),
        ({"RANK": "-1", "WORLD_SIZE": "2"}, "RANK must be a whole number, got RANK='-1'"),
        ({"RANK": "2", "WORLD_SIZE": "2", **HOME}, "RANK must be below WORLD_SIZE, got 2 and 2. Ranks count from 0"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "got no MASTER_ADDR, WORLD_SIZE=2 and an unknown number of ranks on this"),
        ({OPEN_MPI[0]: "1"}, f"Open MPI must say {OPEN_MPI[0]} and {OPEN_MPI[1]}, got {OPEN_MPI[0]}=1 without"),
        ({OPEN_MPI[1]: "2"}, f"got {OPEN_MPI[1]}=2 without {OPEN_MPI[0]}"),
        ({"PMI_RANK": "0", "PMI_SIZE": "two"}, "PMI_SIZE must be a whole number, got PMI_SIZE='two'"),
        (said(0, "0", "2", "zero"), f"{OPEN_MPI[2]} must be a whole number"),
    ],
    ids=range(10),
)
def test_what_is_said_by_half_is_told_with_what_to_do(env: dict[str, str], told: str) -> None:
    assert any(told in problem for problem in adopt(dict(env))), adopt(dict(env))
