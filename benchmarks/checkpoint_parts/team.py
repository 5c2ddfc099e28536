"""Ranks in processes of their own that let the contenders take turns."""

from __future__ import annotations

import multiprocessing
import os
import traceback
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.checkpoint_contenders import Contenders
from benchmarks.checkpoint_parts.state import State
from megatron.checkpoint import save
from megatron.mpu.groups import build_grid
from megatron.mpu.topology import Topology

PATIENCE_S = 600.0


@dataclass(frozen=True)
class Task:
    """What a team does.

    Args:
        num_bytes: of the whole state, about.
        rounds: turns of each contender that count; one more warms up. 0: only save once, to ``folder / "saved"``.
        other: a checkpoint that another number of ranks saved.
    """

    num_ranks: int
    num_bytes: int
    rounds: int
    threads: int
    folder: Path
    other: Path | None = None


@dataclass
class Told:
    """What a team found: seconds of each measure by round, bytes of the state and of each contender's files."""

    seconds: dict[str, list[float]] = field(default_factory=dict)
    state_bytes: int = 0
    files_bytes: dict[str, int] = field(default_factory=dict)
    saved: Path | None = None


def run_team(task: Task, start_method: str) -> Told:
    """Return what rank 0 of the team tells.

    Raises:
        RuntimeError: a rank failed; its traceback is the message.
    """
    context = multiprocessing.get_context(start_method)
    task.folder.mkdir(parents=True, exist_ok=True)
    pipes, ranks = [], []
    try:
        for rank in range(task.num_ranks):
            near, far = context.Pipe()
            pipes.append(near)
            ranks.append(context.Process(target=_rank, args=(rank, task, far), daemon=True))  # type: ignore[attr-defined]
            ranks[-1].start()
            far.close()
        told = [_answer(rank, pipe) for rank, pipe in enumerate(pipes)]
        failures = [each for each in told if isinstance(each, str)]
        if failures:
            raise RuntimeError("\n".join(failures))
        return told[0]  # type: ignore[return-value]
    finally:
        for process in ranks:
            process.join(timeout=20.0)
            if process.is_alive():
                process.kill()


def _answer(rank: int, pipe: Connection) -> Told | str:
    """Return what a rank tells, or why it failed."""
    if not pipe.poll(PATIENCE_S):
        return f"rank {rank} did not answer within {PATIENCE_S:g} s"
    try:
        return pipe.recv()
    except EOFError:
        return f"rank {rank} died"


def _rank(rank: int, task: Task, pipe: Connection) -> None:
    try:
        pipe.send(_measure(rank, task))
    except Exception:
        pipe.send(f"rank {rank} failed:\n{traceback.format_exc()}")
    finally:
        pipe.close()


def _measure(rank: int, task: Task) -> Told:
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(task.num_ranks), LOCAL_WORLD_SIZE=str(task.num_ranks),
        MASTER_ADDR="localhost", MASTER_PORT="0", DS_ACCELERATOR="cpu",
    )  # fmt: skip
    torch.set_num_threads(task.threads)
    store = dist.FileStore(str(task.folder / "store"), task.num_ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=task.num_ranks)
    grid = build_grid(Topology.of_world(task.num_ranks, tensor=task.num_ranks, pipe=1), rank)
    state, told = State(task.num_bytes, grid), Told()
    if task.other is None:
        told.saved = save(task.folder / "saved", 1, state.records(), {}, grid.host)
    else:
        contenders = Contenders(state, grid, task.folder, task.other)
        told.seconds = _rounds(contenders, task.rounds)
        told.files_bytes = contenders.files_bytes
        contenders.close()
    told.state_bytes = _sum(state.num_bytes())
    dist.barrier()
    dist.destroy_process_group()
    return told


def _rounds(contenders: Contenders, rounds: int) -> dict[str, list[float]]:
    """Return the seconds of each measure; the order rotates from round to round, the first round warms up."""
    names = list(contenders.turns)
    found: dict[str, list[float]] = {}
    for number in range(rounds + 1):
        shift = number % len(names)
        for name in names[shift:] + names[:shift]:
            for measure, seconds in contenders.turns[name]().items():
                if number:
                    found.setdefault(measure, []).append(seconds)
    return found


def _sum(value: int) -> int:
    total = torch.tensor(value)
    dist.all_reduce(total)
    return int(total)
