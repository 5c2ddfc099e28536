"""Whoever starts the ranks, each knows which it is; what is said by half is told."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.runtime.rank_env import STARTERS, set_rank_environment
from megatron.training.startup import pretrain
from tests.helpers.harness import fork_ranks

ROOT = Path(__file__).resolve().parents[2]

TORCH = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
HOME = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
OPEN_MPI = STARTERS[0].variables


def said(starter: int, *numbers: str) -> dict[str, str]:
    return dict(zip(STARTERS[starter].variables, numbers, strict=False))


@pytest.mark.parametrize("starter", range(len(STARTERS)), ids=[each.name for each in STARTERS])
def test_the_ranks_of_every_program_meet_on_their_host_or_where_the_user_says(starter: int) -> None:
    env = said(starter, "1", "2", "1", "2")
    assert set_rank_environment(env) == [] and env == said(starter, "1", "2", "1", "2") | TORCH | HOME
    spread = said(starter, "3", "4", "1", "2") | {"MASTER_ADDR": "node0", "MASTER_PORT": "7"}
    assert set_rank_environment(spread) == []
    assert {name: spread[name] for name in TORCH} == dict(zip(TORCH, "3412", strict=True))
    assert (spread["MASTER_ADDR"], spread["MASTER_PORT"]) == ("node0", "7")
    lost = said(starter, "3", "4", "1", "2")
    message = (
        f"got none, WORLD_SIZE=4 and 2 ranks on this host. Set it to the host of rank 0: {STARTERS[starter].hand_over}"
    )
    assert [message in problem for problem in set_rank_environment(lost)] == [True]


def test_slurms_tasks_of_each_node_are_counted_and_what_is_no_step_is_alone() -> None:
    env = said(2, "5", "8", "1", "4(x2)") | {"MASTER_ADDR": "n0"}
    assert set_rank_environment(env) == [] and (env.get("LOCAL_WORLD_SIZE"), env.get("RANK")) == ("4", "5")
    batch = {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "8"}
    assert set_rank_environment(batch) == [] and "RANK" not in batch


@pytest.mark.parametrize("alone", [{}, {"WORLD_SIZE": "1"}, said(0, "0", "1"), said(3, "0", "1")], ids=range(4))
def test_a_process_alone_stays_alone(alone: dict[str, str]) -> None:
    env = dict(alone)
    assert set_rank_environment(env) == [] and env == alone


def test_what_torchrun_says_counts_ahead_of_what_started_torchrun() -> None:
    env = TORCH | {"MASTER_ADDR": "n0", "MASTER_PORT": "7"} | said(0, "0", "4", "0", "1") | said(2, "0", "2", "0", "1")
    before = dict(env)
    assert set_rank_environment(env) == [] and env == before
    of_kubernetes = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "gpt2-0", "MASTER_PORT": "23456"}
    assert set_rank_environment(dict(of_kubernetes)) == []


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ({"RANK": "0"}, "must set RANK and WORLD_SIZE, got RANK=0 without WORLD_SIZE. Start the ranks with torchrun"),
        ({"WORLD_SIZE": "4"}, "WORLD_SIZE=4 requires RANK, the index of this process, got none"),
        ({"RANK": "x", "WORLD_SIZE": "2"}, "RANK must be a non-negative integer, got RANK='x'"),
        ({"RANK": "-1", "WORLD_SIZE": "2"}, "RANK must be a non-negative integer, got RANK='-1'"),
        (
            {"RANK": "2", "WORLD_SIZE": "2", **HOME},
            "RANK must be less than WORLD_SIZE, got 2 and 2. Ranks are numbered",
        ),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "got none, WORLD_SIZE=2 and an unknown number of ranks on this"),
        ({OPEN_MPI[0]: "1"}, f"Open MPI must say {OPEN_MPI[0]} and {OPEN_MPI[1]}, got {OPEN_MPI[0]}=1 without"),
        ({OPEN_MPI[1]: "2"}, f"got {OPEN_MPI[1]}=2 without {OPEN_MPI[0]}"),
        ({"PMI_RANK": "0", "PMI_SIZE": "two"}, "PMI_SIZE must be a non-negative integer, got PMI_SIZE='two'"),
        (said(0, "0", "2", "zero"), f"{OPEN_MPI[2]} must be a non-negative integer"),
        ({"RANK": ""}, "must say RANK and WORLD_SIZE, got none of these without RANK and WORLD_SIZE"),
        ({"RANK": "1(x2)", "WORLD_SIZE": "2", **HOME}, "RANK must be a non-negative integer, got RANK='1(x2)'"),
        ({"LOCAL_RANK": "x"}, "LOCAL_RANK must be a non-negative integer, got LOCAL_RANK='x'"),
        (TORCH | {"MASTER_PORT": "0"}, "MASTER_PORT must be a number from 1 to 65535, got MASTER_PORT='0'"),
        (said(2, "1", "2", "1", "2") | {"MASTER_PORT": "-1"}, "got MASTER_PORT='-1'. Set a free port of the host of"),
    ],
    ids=range(15),
)
def test_what_is_said_by_half_is_told_with_what_to_do(env: dict[str, str], message: str) -> None:
    assert any(message in problem for problem in set_rank_environment(dict(env))), set_rank_environment(dict(env))


def test_a_process_alone_may_take_any_port() -> None:
    assert set_rank_environment({"RANK": "0", "WORLD_SIZE": "1", "MASTER_PORT": "0"}) == []


def _of_several(rank: str, size: str, **more: str) -> dict[str, str]:
    return {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", **more}


OWN_MISTAKES = [
    (_of_several("2", "2"), "rank 2 failed: ConfigError: RANK must be below WORLD_SIZE, got 2 and 2. Ranks count fr"),
    (
        _of_several("-1", "2"),
        "failed: ConfigError: RANK must be a non-negative integer, got RANK='-1'. Start the ranks",
    ),
    (_of_several("x", "2"), "failed: ConfigError: RANK must be a non-negative integer, got RANK='x'. Start the ranks"),
    (
        _of_several("1", "two"),
        "rank 1 failed: ConfigError: WORLD_SIZE must be a non-negative integer, got WORLD_SIZE='two'",
    ),
    (_of_several("1", "\N{SUPERSCRIPT TWO}"), "rank 1 failed: ConfigError: WORLD_SIZE must be a non-negative integer"),
    (
        _of_several("1", "2", LOCAL_RANK="y"),
        "rank 1 failed: ConfigError: LOCAL_RANK must be a non-negative integer, got LO",
    ),
    (
        {"RANK": "1", "WORLD_SIZE": "4"},
        "rank 1 failed: ConfigError: MASTER_ADDR must be set if ranks run on several hosts",
    ),
    ({"WORLD_SIZE": "0"}, "rank 0 failed: ConfigError: WORLD_SIZE=0 requires RANK, the index of this process"),
    (_of_several("1", "2", MASTER_PORT="abc"), "rank 1 failed: ConfigError: MASTER_PORT must be a number from 1"),
    (_of_several("1", "2", MASTER_PORT="70000"), "to 65535, got MASTER_PORT='70000'. Set a free port"),
    (_of_several("1", "2", MASTER_PORT=""), "to 65535, got MASTER_PORT=''. Set a free port"),
]
"""What one process has in its environment, and what it says itself; no other would."""


@pytest.mark.parametrize(("number", "env", "message"), [(n, *each) for n, each in enumerate(OWN_MISTAKES)])
def test_a_mistake_in_its_own_environment_is_said_by_the_very_process(
    number: int, env: dict[str, str], message: str, tmp_path: Path
) -> None:
    """Every second one has a wrong flag beside it, which rank 0 would tell."""
    argv = ["--num-layers", "some"] if number % 2 else []

    def start(rank: int) -> None:
        os.dup2(os.open(tmp_path / "log", os.O_CREAT | os.O_WRONLY), 2)
        sys.stderr, sys.argv = os.fdopen(2, "w", closefd=False), ["pretrain_gpt2.py", *argv]
        os.environ.clear()
        os.environ.update(env)
        pretrain(None, None, None)  # type: ignore[arg-type]

    codes, *_ = fork_ranks(1, start, init=False)
    text = (tmp_path / "log").read_text()
    assert codes == [2] and message in text and text.count("\n") == 1, (codes, text)


def test_a_flag_that_all_ranks_find_wrong_is_not_said_by_each_and_a_device_index_is(tmp_path: Path) -> None:
    """In processes of their own, as a user starts them by hand."""

    def start(*argv: str) -> tuple[int, str]:
        env = {"PATH": os.environ["PATH"], **_of_several("1", "2")}
        done = subprocess.run(
            [sys.executable, ROOT / "pretrain_gpt2.py", *argv], env=env, capture_output=True, text=True
        )
        return done.returncode, done.stdout + done.stderr

    assert start("--num-layers", "some") == (2, "")
    code, output = start("--local_rank", "1")
    assert code == 2
    assert output.startswith("rank 1 failed: ConfigError:") and "--local_rank must agree with LOCAL_RANK" in output


def test_a_plan_for_many_ranks_names_the_wrong_flags(tmp_path: Path) -> None:
    """As docs/migration.md begins: one process with a WORLD_SIZE asks which flags of a script are refused."""

    def start(rank: int) -> None:
        os.dup2(os.open(tmp_path / "log", os.O_CREAT | os.O_WRONLY), 2)
        sys.stderr = os.fdopen(2, "w", closefd=False)
        sys.argv = [
            "pretrain_gpt2.py",
            "--dry-run",
            "--vocab-size",
            "64",
            "--multi-latent-attention",
            "--adam-beta2",
            "2",
        ]
        os.environ.clear()
        os.environ.update(WORLD_SIZE="8")
        pretrain(None, None, None)  # type: ignore[arg-type]

    codes, *_ = fork_ranks(1, start, init=False)
    text = (tmp_path / "log").read_text()
    assert codes == [2] and "--multi-latent-attention is not supported" in text and "RANK" not in text, (codes, text)
