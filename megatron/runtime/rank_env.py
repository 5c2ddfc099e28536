"""Rank environment: RANK, WORLD_SIZE and related variables from torchrun, our launcher, SLURM or MPI. No torch.

| started by | rank, size, rank and size on this host |
|---|---|
| our launcher, torchrun, ``deepspeed``, a PyTorchJob | RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE |
| Open MPI's mpirun | OMPI_COMM_WORLD_RANK, ..._SIZE, ..._LOCAL_RANK, ..._LOCAL_SIZE |
| MVAPICH's mpirun | MV2_COMM_WORLD_RANK, ..._SIZE, ..._LOCAL_RANK, ..._LOCAL_SIZE |
| srun, with one task per rank | SLURM_PROCID, SLURM_STEP_NUM_TASKS, SLURM_LOCALID, SLURM_STEP_TASKS_PER_NODE |
| mpiexec of MPICH and Intel MPI (Hydra) | PMI_RANK, PMI_SIZE, MPI_LOCALRANKID, MPI_LOCALNRANKS |

The first row with any variable set applies. The last four rows do not define the host of rank 0: on a single host it is
127.0.0.1, otherwise the user must set MASTER_ADDR.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, MutableMapping
from typing import NamedTuple

from megatron.errors import marked, raise_all

DEFAULT_PORT = "29500"
MAX_PORT = 65535
_TASKS_PER_NODE = "SLURM_STEP_TASKS_PER_NODE"  # such as 4(x2)
TORCH_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


class RankLauncher(NamedTuple):
    """A program that starts ranks.

    Args:
        variables: environment variables with rank, size, local rank and local size.
        env_syntax: command-line syntax that passes a variable to the ranks.
    """

    name: str
    variables: tuple[str, str, str, str]
    env_syntax: str


LAUNCHERS = (
    RankLauncher(
        "Open MPI",
        ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
        "mpirun -x MASTER_ADDR=HOST",
    ),
    RankLauncher(
        "MVAPICH",
        ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_SIZE"),
        "mpirun_rsh ... MASTER_ADDR=HOST",
    ),
    RankLauncher(
        "srun",
        ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", _TASKS_PER_NODE),
        "export MASTER_ADDR=HOST before srun",
    ),
    RankLauncher(
        "Hydra",
        ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
        "mpiexec -genv MASTER_ADDR HOST",
    ),
)


def set_rank_environment(env: MutableMapping[str, str]) -> list[str]:
    """Set torch's variables in ``env`` from the variables of the program that started this process; return errors.

    ``env`` is unchanged for a process that was started without a launcher.
    """
    if "RANK" in env:
        return [
            *_rank_number_problems(env, TORCH_VARIABLES, "the environment"),
            *_set_address(env, "export MASTER_ADDR=HOST"),
        ]
    launcher = next(
        (candidate for candidate in LAUNCHERS if any(name in env for name in candidate.variables[:2])), None
    )
    if launcher is None or not _has_several_processes(env, launcher):
        return list(_single_process_problems(env))
    problems = list(_rank_number_problems(env, launcher.variables, launcher.name))
    if not problems:
        for torch_variable, launcher_variable in zip(TORCH_VARIABLES, launcher.variables, strict=True):
            if launcher_variable in env:
                env[torch_variable] = _leading_number(env[launcher_variable])
        problems = list(_set_address(env, launcher.env_syntax))
    return problems


def _has_several_processes(env: Mapping[str, str], launcher: RankLauncher) -> bool:
    """Return True if ``launcher`` started several processes; variables of SLURM are ignored outside a step of srun."""
    rank, size, *_ = launcher.variables
    if launcher.name == "srun" and size not in env:
        return False
    return env.get(size) != "1"


def _rank_number_problems(env: Mapping[str, str], variables: tuple[str, ...], source: str) -> Iterator[str]:
    """Yield errors about rank, size, local rank and local size; the last two are optional."""
    rank, size, *local = variables
    missing = [name for name in (rank, size) if not env.get(name)]
    if missing:
        present_text = ", ".join(f"{name}={env[name]}" for name in variables if env.get(name))
        actual = f"{present_text} without {' and '.join(missing)}" if present_text else "neither"
        yield f"{source} must set {rank} and {size}, got {actual}. {_START_ADVICE}"
        return
    invalid = [name for name in (rank, size, *local) if name in env and not _is_number(name, env[name])]
    for name in invalid:
        yield f"{name} must be a non-negative integer, got {name}={env[name]!r}. {_START_ADVICE}"
    if not invalid and int(_leading_number(env[rank])) >= int(_leading_number(env[size])):
        yield f"{rank} must be less than {size}, got {env[rank]} and {env[size]}. Ranks are numbered from 0"


def _set_address(env: MutableMapping[str, str], env_syntax: str) -> Iterator[str]:
    """Set MASTER_ADDR and MASTER_PORT to their defaults; yield errors about a missing address or invalid port."""
    size = env.get("WORLD_SIZE")
    if not env.get("MASTER_ADDR"):
        if size != "1" and env.get("LOCAL_WORLD_SIZE") != size:
            yield (
                f"MASTER_ADDR must be set if ranks run on several hosts, got none, WORLD_SIZE={size} and "
                f"{env.get('LOCAL_WORLD_SIZE', 'an unknown number of')} ranks on this host. Set it to the host of "
                f"rank 0: {env_syntax}"
            )
            return
        env["MASTER_ADDR"] = "127.0.0.1"
    port = env.setdefault("MASTER_PORT", DEFAULT_PORT)
    min_port = 0 if size == "1" else 1  # only a single process may use any free port (0)
    if not re.fullmatch("[0-9]{1,5}", port) or not min_port <= int(port) <= MAX_PORT:
        yield (
            f"MASTER_PORT must be a number from {min_port} to {MAX_PORT}, got MASTER_PORT={port!r}. Set a free port "
            f"of the host of rank 0, the same on every rank, or unset it to use {DEFAULT_PORT}"
        )


def _single_process_problems(env: Mapping[str, str]) -> Iterator[str]:
    """Yield errors about variables that mention other ranks without stating the rank of this process."""
    if env.get("WORLD_SIZE", "1") != "1":
        yield f"WORLD_SIZE={env['WORLD_SIZE']} requires RANK, the index of this process, got none. {_START_ADVICE}"
    if not _is_number("LOCAL_RANK", env.get("LOCAL_RANK", "0")):
        yield f"LOCAL_RANK must be a non-negative integer, got LOCAL_RANK={env['LOCAL_RANK']!r}. {_START_ADVICE}"


def raise_on_this_rank(problems: list[str]) -> None:
    """Raise a ConfigError for ``problems``, if any, attributed to this rank.

    Every process reports its own errors, because other processes do not see its variables and there may be no rank 0.
    """
    with marked(is_of_this_rank=True):
        raise_all(problems)


def process_name(env: Mapping[str, str]) -> str:
    """Return this process's name for messages, even if its variables are invalid."""
    rank = env.get("RANK", "0")
    return f"rank {rank}" if _is_number("RANK", rank) else f"process {os.getpid()}"


def has_valid_world_size(env: Mapping[str, str]) -> bool:
    """Return True if ``env`` has a valid number of ranks, or none, which means one rank."""
    size = env.get("WORLD_SIZE", "1")
    return _is_number("WORLD_SIZE", size) and int(size) > 0


def _is_number(name: str, text: str) -> bool:
    return _leading_number(text) == text != "" or (name == _TASKS_PER_NODE and _leading_number(text) != "")


def _leading_number(text: str) -> str:
    """Parse the number at the start of ``text`` ("4" in SLURM's "4(x2)"), or return ""."""
    match = re.match(r"[0-9]+(?=$|\(|,)", text)
    return match.group() if match else ""


_START_ADVICE = "Start the ranks with torchrun, deepspeed, mpirun, srun or a run script, or unset these variables"
