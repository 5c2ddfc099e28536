"""pretrain(): RANK and the rest from torchrun, SLURM or MPI, command line, dry run, failure guard (no torch)."""

from __future__ import annotations

import argparse
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from megatron import training
from megatron.arguments import parse
from megatron.arguments.scan import Scan
from megatron.arguments.validate import find_problems, raise_all
from megatron.config import Config, elastic
from megatron.errors import ConfigError, JobError, marked
from megatron.training import failure
from megatron.training.dry_run import dry_run
from megatron.training.exit_signals import StopRequests
from megatron.training.failure import guard, trace_crashes

# Who this process is among those that were started with it: RANK, WORLD_SIZE and the rest, whoever started it.
#
# | started by | rank, size, rank and size on this host |
# |---|---|
# | our launcher, torchrun, ``deepspeed``, a PyTorchJob | RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE |
# | Open MPI's mpirun | OMPI_COMM_WORLD_RANK, ..._SIZE, ..._LOCAL_RANK, ..._LOCAL_SIZE |
# | MVAPICH's mpirun | MV2_COMM_WORLD_RANK, ..._SIZE, ..._LOCAL_RANK, ..._LOCAL_SIZE |
# | srun, with a task for each rank | SLURM_PROCID, SLURM_STEP_NUM_TASKS, SLURM_LOCALID, SLURM_STEP_TASKS_PER_NODE |
# | mpiexec of MPICH and Intel MPI (Hydra) | PMI_RANK, PMI_SIZE, MPI_LOCALRANKID, MPI_LOCALNRANKS |
#
# The first of them that says anything counts. None of the last four names the host of rank 0: on one host that is
# 127.0.0.1, elsewhere the user says MASTER_ADDR.

DEFAULT_PORT = "29500"
MOST_PORT = 65535
_TASKS_OF_NODES = "SLURM_STEP_TASKS_PER_NODE"  # such as 4(x2)
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
        ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", _TASKS_OF_NODES),
        "export MASTER_ADDR=HOST ahead of srun",
    ),
    Starter(
        "Hydra",
        ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
        "mpiexec -genv MASTER_ADDR HOST",
    ),
)


def set_rank_environment(env: MutableMapping[str, str]) -> list[str]:
    """Say in ``env`` under torch's names what the program that started this process says; return what is wrong.

    A process that was started alone stays so: nothing is set.
    """
    if "RANK" in env:
        return [*_number_problems(env, OURS, "the environment"), *_set_address(env, "export MASTER_ADDR=HOST")]
    starter = next((each for each in STARTERS if any(name in env for name in each.variables[:2])), None)
    if starter is None or not _is_of_several(env, starter):
        return list(_lonely_problems(env))
    problems = list(_number_problems(env, starter.variables, starter.name))
    if not problems:
        for ours, theirs in zip(OURS, starter.variables, strict=True):
            if theirs in env:
                env[ours] = _first_number(env[theirs])
        problems = list(_set_address(env, starter.hand_over))
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
        got = ", ".join(f"{name}={env[name]}" for name in variables if env.get(name)) or "none of these"
        yield f"{who} must say {rank} and {size}, got {got} without {' and '.join(missing)}. {_START}"
        return
    wrong = [name for name in (rank, size, *local) if name in env and not _is_number(name, env[name])]
    for name in wrong:
        yield f"{name} must be a whole number, got {name}={env[name]!r}. {_START}"
    if not wrong and int(_first_number(env[rank])) >= int(_first_number(env[size])):
        yield f"{rank} must be below {size}, got {env[rank]} and {env[size]}. Ranks count from 0"


def _set_address(env: MutableMapping[str, str], hand_over: str) -> Iterator[str]:
    """Set MASTER_ADDR and MASTER_PORT where they follow; yield that the first does not, or that the second is none."""
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
    port = env.setdefault("MASTER_PORT", DEFAULT_PORT)
    least = 0 if size == "1" else 1  # a process alone may take any free port, others have to be told which
    if not re.fullmatch("[0-9]{1,5}", port) or not least <= int(port) <= MOST_PORT:
        yield (
            f"MASTER_PORT must be a number from {least} to {MOST_PORT}, got MASTER_PORT={port!r}. Name a free port of "
            f"the host of rank 0, the same for every rank, or leave it out for {DEFAULT_PORT}"
        )


def _lonely_problems(env: Mapping[str, str]) -> Iterator[str]:
    """Yield that others are spoken of, but not which of them this process is."""
    if env.get("WORLD_SIZE", "1") != "1":
        yield f"WORLD_SIZE={env['WORLD_SIZE']} needs RANK, which of them this process is, got none. {_START}"
    if not _is_number("LOCAL_RANK", env.get("LOCAL_RANK", "0")):
        yield f"LOCAL_RANK must be a whole number, got LOCAL_RANK={env['LOCAL_RANK']!r}. {_START}"


def raise_own(problems: list[str]) -> None:
    """Raise one ConfigError of this very process: no other sees its variables, and rank 0 may not be there to say it.

    Returns when there are no problems.
    """
    with marked(is_of_this_rank=True):
        raise_all(problems)


def name_of(env: Mapping[str, str]) -> str:
    """Return the process in words, for messages, where its variables may be anything."""
    rank = env.get("RANK", "0")
    return f"rank {rank}" if _is_number("RANK", rank) else f"process {os.getpid()}"


def has_world(env: Mapping[str, str]) -> bool:
    """Tell whether ``env`` says a number of ranks, or none, which is one."""
    size = env.get("WORLD_SIZE", "1")
    return _is_number("WORLD_SIZE", size) and int(size) > 0


def _is_number(name: str, text: str) -> bool:
    return _first_number(text) == text != "" or (name == _TASKS_OF_NODES and _first_number(text) != "")


def _first_number(text: str) -> str:
    """Return the number that ``text`` begins with ("4" of SLURM's "4(x2)"), or nothing."""
    found = re.match(r"[0-9]+(?=$|\(|,)", text)
    return found.group() if found else ""


_START = "Start the ranks by torchrun, deepspeed, mpirun, srun or a run script, or leave these variables out"


# ``pretrain``: what a script calls with its data sets, its model and its forward step.
#
# This module imports neither torch nor DeepSpeed, so that --help and --dry-run answer at once; ``training.start``
# brings them in when the run begins.


def refit(config: Config, span: elastic.Span, num_ranks: int) -> tuple[Config, int]:
    """Return ``config`` for ``num_ranks`` of an elastic job, and how many of them have work; the same on each.

    Raises:
        ConfigError: there is no layout for them.
    """
    elastic.check_fewest(config, span)
    problems: list[str] = []
    for count in elastic.replica_counts(config, span, num_ranks):
        fitted, used = elastic.with_replicas(config, span, count), count * config.parallel.replica_size
        found = find_problems(fitted, used)
        if not found:
            note = elastic.describe(fitted, span, num_ranks, count)
            return replace(fitted, notes=(*fitted.notes, note)), used
        problems = problems or found
    raise_all([f"with {num_ranks} of {span.most} ranks: {problem}" for problem in problems])
    raise ConfigError(
        f"no number of replicas on {num_ranks} of {span.most} ranks shares out the global batch by micro-batches of "
        f"{config.batch.batch_size}. Lower --batch-size, or choose a global batch with more divisors"
    )


def _checkpoint_args(found: Scan, defaults: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return sizes and data settings that come from the run or folder of --load or --resume."""
    from megatron.checkpoint import checkpoint_args, run_data  # 10 ms, which --help does not wait

    return {**checkpoint_args.bring(found, defaults, name), **run_data.bring_data(found, defaults, name)}


def pretrain(
    train_valid_test_datasets_provider: Callable[[list[int]], tuple[Any, Any, Any]],
    model_provider: Callable[[], Any],
    forward_step: Callable[[Any, Any], tuple[Any, dict[str, Any]]],
    *,
    extra_args_provider: Callable[[argparse.ArgumentParser], argparse.ArgumentParser] | None = None,
    args_defaults: Mapping[str, Any] | None = None,
    name: str | None = None,
    family: str = "gpt2",
    callbacks: Sequence[Any] = (),
) -> None:
    """Train, from the command line to the test loss. Collective; a failure ends the process with the job's exit code.

    Args:
        train_valid_test_datasets_provider: given the samples that the three splits will be asked for, returns three
            data sets (or None); a data set has an item for every index. Called only on ranks that read data.
        model_provider: returns the model: a module, or with 2 and more stages a PipelineModule.
        forward_step: given (data iterator or None, model), returns (loss, named losses). Not used with a pipeline.
        extra_args_provider: adds flags of the script's own to an argparse parser.
        args_defaults: flag names with values that hold where the user gives none.
        name: of the run folder, ``runs/<name>-<time>``; None: the script's, without ``pretrain_``.
        family: "gpt2", "t5", "llama", "mpt" or "bert": which flags there are; a model of your own takes those of the
            one it resembles.
        callbacks: of the script's own: ``megatron.training.Callback``, made alike on every rank.
    """
    unsettled = set_rank_environment(os.environ)  # ahead of all that asks for RANK
    started = float(os.environ.get("MEGATRON_STARTED") or time.monotonic())  # of the job's first start on this machine
    names = {"who": name_of(os.environ)}

    run_name = name or Path(sys.argv[0]).stem.removeprefix("pretrain_")
    stop = StopRequests()

    def main() -> None:
        if not has_world(os.environ):
            raise_own(unsettled)
        world_size = int(os.environ.get("WORLD_SIZE", "1"))
        span = elastic.span_of(os.environ)
        defaults = dict(args_defaults or {})
        try:
            config = parse(
                sys.argv[1:],
                world_size=span.most if span else world_size,
                extra_args_provider=extra_args_provider,
                defaults=defaults,
                family=family,
                checkpoint_args=partial(_checkpoint_args, name=run_name),
            )
        except JobError:
            if "--dry-run" not in sys.argv:  # which starts no ranks
                raise_own(unsettled)
            raise
        if config.run.dry_run:
            dry_run(config, world_size, Path(sys.argv[0]).name, run_name)
            return
        raise_own(unsettled)
        if span is not None:
            config, world_size = refit(config, span, world_size)
            if int(os.environ["RANK"]) >= world_size:
                failure.note_state(failure.IDLE)
                return
            os.environ["WORLD_SIZE"] = str(world_size)
        providers = (train_valid_test_datasets_provider, model_provider, forward_step)
        failure.note_state(failure.RUNNING)
        training.configure_device(config)  # before DeepSpeed is imported
        training.start(config, names, *providers, run_name, started, stop, callbacks)
        failure.note_state("")

    stop.listen()
    trace_crashes()
    failure.open_page()
    guard(main, lambda: names["who"])
