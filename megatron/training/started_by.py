"""Who this process is among those that were started with it: RANK, WORLD_SIZE and the rest, whoever started it.

| started by | rank, size, rank and size on this host |
|---|---|
| our launcher, torchrun, ``deepspeed``, a PyTorchJob | RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE |
| Open MPI's mpirun | OMPI_COMM_WORLD_RANK, ..._SIZE, ..._LOCAL_RANK, ..._LOCAL_SIZE |
| MVAPICH's mpirun | MV2_COMM_WORLD_RANK, ..._SIZE, ..._LOCAL_RANK, ..._LOCAL_SIZE |
| srun, with a task for each rank | SLURM_PROCID, SLURM_STEP_NUM_TASKS, SLURM_LOCALID, SLURM_STEP_TASKS_PER_NODE |
| mpiexec of MPICH and Intel MPI (Hydra) | PMI_RANK, PMI_SIZE, MPI_LOCALRANKID, MPI_LOCALNRANKS |

The first of them that says anything counts. None of the last four names the host of rank 0: on one host that is
127.0.0.1, elsewhere the user says MASTER_ADDR.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, MutableMapping
from typing import NamedTuple

DEFAULT_PORT = "29500"
OURS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


class Starter(NamedTuple):
    """A program that starts ranks, the variables in which it says the four numbers, and how it is told a variable."""

    name: str
    variables: tuple[str, str, str, str]
    hand_over: str


STARTERS = (
    Starter(
        "Open MPI",
        ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
        "mpirun -x MASTER_ADDR=HOST",
    ),
    Starter(
        "MVAPICH",
        ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_SIZE"),
        "mpirun_rsh ... MASTER_ADDR=HOST",
    ),
    Starter(
        "srun",
        ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"),
        "export MASTER_ADDR=HOST ahead of srun",
    ),
    Starter(
        "Hydra",
        ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
        "mpiexec -genv MASTER_ADDR HOST",
    ),
)


def adopt(env: MutableMapping[str, str]) -> list[str]:
    """Say in ``env`` under torch's names what the program that started this process says; return what is wrong.

    A process that was started alone stays so: nothing is set.
    """
    if "RANK" in env:
        return [*_number_problems(env, OURS, "the environment"), *_settle_address(env, "export MASTER_ADDR=HOST")]
    starter = next((each for each in STARTERS if any(name in env for name in each.variables[:2])), None)
    if starter is None or not _is_of_several(env, starter):
        return list(_lonely_problems(env))
    problems = list(_number_problems(env, starter.variables, starter.name))
    if not problems:
        for ours, theirs in zip(OURS, starter.variables, strict=True):
            if theirs in env:
                env[ours] = _first_number(env[theirs])
        problems = list(_settle_address(env, starter.hand_over))
    return problems


def _is_of_several(env: Mapping[str, str], starter: Starter) -> bool:
    """False for one process alone, and for srun's own variables outside of a step."""
    rank, size, *_ = starter.variables
    if starter.name == "srun" and size not in env:
        return False
    return env.get(size) != "1"


def _number_problems(env: Mapping[str, str], variables: tuple[str, ...], who: str) -> Iterator[str]:
    """Yield what the four numbers cannot be; the two of this host may be left out."""
    rank, size, *local = variables
    missing = [name for name in (rank, size) if not env.get(name)]
    if missing:
        got = ", ".join(f"{name}={env[name]}" for name in variables if env.get(name))
        yield f"{who} must say {rank} and {size}, got {got} without {' and '.join(missing)}. {_START}"
        return
    wrong = [name for name in (rank, size, *local) if name in env and not _first_number(env[name])]
    for name in wrong:
        yield f"{name} must be a whole number, got {name}={env[name]!r}. {_START}"
    if not wrong and int(_first_number(env[rank])) >= int(_first_number(env[size])):
        yield f"{rank} must be below {size}, got {env[rank]} and {env[size]}. Ranks count from 0"


def _settle_address(env: MutableMapping[str, str], hand_over: str) -> Iterator[str]:
    """Set MASTER_ADDR and MASTER_PORT where they follow; yield that the first is missing where it does not."""
    size = env.get("WORLD_SIZE")
    if not env.get("MASTER_ADDR"):
        if size != "1" and env.get("LOCAL_WORLD_SIZE") != size:
            yield (
                "ranks of several hosts meet on that of rank 0, got no MASTER_ADDR, WORLD_SIZE="
                f"{size} and {env.get('LOCAL_WORLD_SIZE', 'an unknown number of')} ranks on this host. "
                f"Say it: {hand_over}"
            )
            return
        env["MASTER_ADDR"] = "127.0.0.1"
    env.setdefault("MASTER_PORT", DEFAULT_PORT)


def _lonely_problems(env: Mapping[str, str]) -> Iterator[str]:
    """Yield that others are spoken of, but not which of them this process is."""
    if env.get("WORLD_SIZE", "1") != "1":
        yield f"WORLD_SIZE={env['WORLD_SIZE']} needs RANK, which of them this process is, got none. {_START}"


def _first_number(text: str) -> str:
    """Return the number that ``text`` begins with ("4" of SLURM's "4(x2)"), or nothing."""
    found = re.match(r"\d+(?=$|\(|,)", text)
    return found.group() if found else ""


_START = "Start the ranks by torchrun, deepspeed, mpirun, srun or a run script, or leave these variables out"
