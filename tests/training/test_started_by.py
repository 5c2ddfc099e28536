"""Whoever starts the ranks, each knows which it is; what is said by half is told."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.runtime.rank_env import LAUNCHERS, set_rank_environment
from megatron.training.startup import pretrain
from tests.helpers.harness import fork_ranks

ROOT = Path(__file__).resolve().parents[2]

TORCH_ENV = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
MASTER_ENV = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
OPEN_MPI_VARIABLES = LAUNCHERS[0].variables


def launcher_env(launcher: int, *values: str) -> dict[str, str]:
    return dict(zip(LAUNCHERS[launcher].variables, values, strict=False))


@pytest.mark.parametrize("launcher", range(len(LAUNCHERS)), ids=[entry.name for entry in LAUNCHERS])
def test_launcher_variables_set_rank_environment_and_default_master(launcher: int) -> None:
    env = launcher_env(launcher, "1", "2", "1", "2")
    assert (
        set_rank_environment(env) == [] and env == launcher_env(launcher, "1", "2", "1", "2") | TORCH_ENV | MASTER_ENV
    )
    multi_node_env = launcher_env(launcher, "3", "4", "1", "2") | {"MASTER_ADDR": "node0", "MASTER_PORT": "7"}
    assert set_rank_environment(multi_node_env) == []
    assert {name: multi_node_env[name] for name in TORCH_ENV} == dict(zip(TORCH_ENV, "3412", strict=True))
    assert (multi_node_env["MASTER_ADDR"], multi_node_env["MASTER_PORT"]) == ("node0", "7")
    env_without_master = launcher_env(launcher, "3", "4", "1", "2")
    message = (
        "got none, WORLD_SIZE=4 and 2 ranks on this host. Set it to the host of rank 0: "
        f"{LAUNCHERS[launcher].env_syntax}"
    )
    assert [message in problem for problem in set_rank_environment(env_without_master)] == [True]


def test_slurm_tasks_per_node_are_counted_and_batch_script_is_skipped() -> None:
    env = launcher_env(2, "5", "8", "1", "4(x2)") | {"MASTER_ADDR": "n0"}
    assert set_rank_environment(env) == [] and (env.get("LOCAL_WORLD_SIZE"), env.get("RANK")) == ("4", "5")
    batch_env = {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "8"}
    assert set_rank_environment(batch_env) == [] and "RANK" not in batch_env


@pytest.mark.parametrize(
    "single_process_env", [{}, {"WORLD_SIZE": "1"}, launcher_env(0, "0", "1"), launcher_env(3, "0", "1")], ids=range(4)
)
def test_single_process_environment_is_unchanged(single_process_env: dict[str, str]) -> None:
    env = dict(single_process_env)
    assert set_rank_environment(env) == [] and env == single_process_env


def test_torchrun_variables_take_precedence_over_launcher() -> None:
    env = (
        TORCH_ENV
        | {"MASTER_ADDR": "n0", "MASTER_PORT": "7"}
        | launcher_env(0, "0", "4", "0", "1")
        | launcher_env(2, "0", "2", "0", "1")
    )
    original_env = dict(env)
    assert set_rank_environment(env) == [] and env == original_env
    kubernetes_env = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "gpt2-0", "MASTER_PORT": "23456"}
    assert set_rank_environment(dict(kubernetes_env)) == []


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ({"RANK": "0"}, "must set RANK and WORLD_SIZE, got RANK=0 without WORLD_SIZE. Start the ranks with torchrun"),
        ({"WORLD_SIZE": "4"}, "WORLD_SIZE=4 requires RANK, the index of this process, got none"),
        ({"RANK": "x", "WORLD_SIZE": "2"}, "RANK must be a non-negative integer, got RANK='x'"),
        ({"RANK": "-1", "WORLD_SIZE": "2"}, "RANK must be a non-negative integer, got RANK='-1'"),
        (
            {"RANK": "2", "WORLD_SIZE": "2", **MASTER_ENV},
            "RANK must be less than WORLD_SIZE, got 2 and 2. Ranks are numbered",
        ),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "got none, WORLD_SIZE=2 and an unknown number of ranks on this"),
        (
            {OPEN_MPI_VARIABLES[0]: "1"},
            f"Open MPI must set {OPEN_MPI_VARIABLES[0]} and {OPEN_MPI_VARIABLES[1]}, got {OPEN_MPI_VARIABLES[0]}=1 "
            "without",
        ),
        ({OPEN_MPI_VARIABLES[1]: "2"}, f"got {OPEN_MPI_VARIABLES[1]}=2 without {OPEN_MPI_VARIABLES[0]}"),
        ({"PMI_RANK": "0", "PMI_SIZE": "two"}, "PMI_SIZE must be a non-negative integer, got PMI_SIZE='two'"),
        (launcher_env(0, "0", "2", "zero"), f"{OPEN_MPI_VARIABLES[2]} must be a non-negative integer"),
        ({"RANK": ""}, "the environment must set RANK and WORLD_SIZE, got neither. Start the ranks"),
        ({"RANK": "1(x2)", "WORLD_SIZE": "2", **MASTER_ENV}, "RANK must be a non-negative integer, got RANK='1(x2)'"),
        ({"LOCAL_RANK": "x"}, "LOCAL_RANK must be a non-negative integer, got LOCAL_RANK='x'"),
        (TORCH_ENV | {"MASTER_PORT": "0"}, "MASTER_PORT must be a number from 1 to 65535, got MASTER_PORT='0'"),
        (
            launcher_env(2, "1", "2", "1", "2") | {"MASTER_PORT": "-1"},
            "got MASTER_PORT='-1'. Set a free port of the host of",
        ),
    ],
    ids=range(15),
)
def test_incomplete_rank_environment_is_reported_with_fix(env: dict[str, str], message: str) -> None:
    assert any(message in problem for problem in set_rank_environment(dict(env))), set_rank_environment(dict(env))


def test_single_process_accepts_any_master_port() -> None:
    assert set_rank_environment({"RANK": "0", "WORLD_SIZE": "1", "MASTER_PORT": "0"}) == []


def _make_rank_env(rank: str, world_size: str, **overrides: str) -> dict[str, str]:
    return {"RANK": rank, "WORLD_SIZE": world_size, "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", **overrides}


PER_RANK_MISTAKES = [
    (_make_rank_env("2", "2"), "rank 2 failed: ConfigError: RANK must be less than WORLD_SIZE, got 2 and 2. Ranks are"),
    (
        _make_rank_env("-1", "2"),
        "failed: ConfigError: RANK must be a non-negative integer, got RANK='-1'. Start the ranks",
    ),
    (
        _make_rank_env("x", "2"),
        "failed: ConfigError: RANK must be a non-negative integer, got RANK='x'. Start the ranks",
    ),
    (
        _make_rank_env("1", "two"),
        "rank 1 failed: ConfigError: WORLD_SIZE must be a non-negative integer, got WORLD_SIZE='two'",
    ),
    (
        _make_rank_env("1", "\N{SUPERSCRIPT TWO}"),
        "rank 1 failed: ConfigError: WORLD_SIZE must be a non-negative integer",
    ),
    (
        _make_rank_env("1", "2", LOCAL_RANK="y"),
        "rank 1 failed: ConfigError: LOCAL_RANK must be a non-negative integer, got LO",
    ),
    (
        {"RANK": "1", "WORLD_SIZE": "4"},
        "rank 1 failed: ConfigError: MASTER_ADDR must be set if ranks run on several hosts",
    ),
    ({"WORLD_SIZE": "0"}, "rank 0 failed: ConfigError: WORLD_SIZE=0 requires RANK, the index of this process"),
    (_make_rank_env("1", "2", MASTER_PORT="abc"), "rank 1 failed: ConfigError: MASTER_PORT must be a number from 1"),
    (_make_rank_env("1", "2", MASTER_PORT="70000"), "to 65535, got MASTER_PORT='70000'. Set a free port"),
    (_make_rank_env("1", "2", MASTER_PORT=""), "to 65535, got MASTER_PORT=''. Set a free port"),
]
"""What one process has in its environment, and what it says itself; no other would."""


@pytest.mark.parametrize(("case_idx", "env", "message"), [(n, *entry) for n, entry in enumerate(PER_RANK_MISTAKES)])
def test_environment_error_is_reported_by_affected_rank(
    case_idx: int, env: dict[str, str], message: str, tmp_path: Path
) -> None:
    """Every second one has a wrong flag beside it, which rank 0 would tell."""
    argv = ["--num-layers", "some"] if case_idx % 2 else []

    def start(rank: int) -> None:
        os.dup2(os.open(tmp_path / "log", os.O_CREAT | os.O_WRONLY), 2)
        sys.stderr, sys.argv = os.fdopen(2, "w", closefd=False), ["pretrain_gpt2.py", *argv]
        os.environ.clear()
        os.environ.update(env)
        pretrain(None, None, None)  # type: ignore[arg-type]

    codes, *_ = fork_ranks(1, start, init=False)
    text = (tmp_path / "log").read_text()
    assert codes == [2] and message in text and text.count("\n") == 1, (codes, text)


def test_flag_error_is_reported_once_and_local_rank_error_by_its_rank(tmp_path: Path) -> None:
    """In processes of their own, as a user starts them by hand."""

    def start(*argv: str) -> tuple[int, str]:
        env = {"PATH": os.environ["PATH"], **_make_rank_env("1", "2")}
        result = subprocess.run(
            [sys.executable, ROOT / "pretrain_gpt2.py", *argv], env=env, capture_output=True, text=True
        )
        return result.returncode, result.stdout + result.stderr

    assert start("--num-layers", "some") == (2, "")
    exit_code, output = start("--local_rank", "1")
    assert exit_code == 2
    assert output.startswith("rank 1 failed: ConfigError:") and "--local_rank must agree with LOCAL_RANK" in output


def test_dry_run_for_many_ranks_reports_rejected_flags(tmp_path: Path) -> None:
    """As docs/migration.md begins: one process with a WORLD_SIZE asks which flags of a script are refused."""

    def start(rank: int) -> None:
        os.dup2(os.open(tmp_path / "log", os.O_CREAT | os.O_WRONLY), 2)
        sys.stderr = os.fdopen(2, "w", closefd=False)
        sys.argv = [
            "pretrain_gpt2.py",
            "--dry-run",
            "--vocab-size",
            "64",
            "--fp8-param-gather",
            "--adam-beta2",
            "2",
        ]
        os.environ.clear()
        os.environ.update(WORLD_SIZE="8")
        pretrain(None, None, None)  # type: ignore[arg-type]

    codes, *_ = fork_ranks(1, start, init=False)
    text = (tmp_path / "log").read_text()
    assert codes == [2] and "--fp8-param-gather is not supported" in text and "RANK" not in text, (codes, text)
