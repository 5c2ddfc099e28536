"""A function in several processes of this machine at once: ranks that meet through a file, answer, and are gone.

``run_ranks(n, function, *args)`` calls ``function(rank, *args)`` in each and returns the answers in rank order. What a
rank tells on the way (``Rank.report``) reaches the caller at once. No port is taken, and no process is left: each is
waited for, ended by force after the deadline, and dies with its parent.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron import device
from megatron.child_process import die_with_parent

Report = Callable[[str], None]


@dataclass(frozen=True)
class Rank:
    """The place of one process: its number, how many there are, and its device.

    Args:
        kind, backend: of the device, and of torch.distributed; "" for no process group.
        threads: of torch's own, on a CPU.
    """

    number: int
    size: int
    kind: str
    backend: str
    threads: int
    _pipe: Connection | None = field(default=None, compare=False)

    @property
    def place(self) -> torch.device:
        return device.bind(self.kind, self.number)

    def report(self, text: str) -> None:
        """Let the caller hear ``text``, from the first rank."""
        if self.number == 0 and self._pipe is not None:
            self._pipe.send(("told", text))

    def meet(self) -> None:
        """Wait for the others. Collective."""
        if self.backend:
            dist.barrier()

    def most(self, value: float) -> float:
        """Return the largest value of all ranks. Collective."""
        return self._reduced(value, dist.ReduceOp.MAX)

    def sum(self, value: float) -> float:
        """Return the sum over all ranks. Collective."""
        return self._reduced(value, dist.ReduceOp.SUM)

    def _reduced(self, value: float, how: Any) -> float:
        if not self.backend:
            return value
        found = torch.tensor([value], dtype=torch.float64, device=self.place)
        dist.all_reduce(found, op=how)
        return found.item()


def run_ranks(
    size: int,
    function: Callable[..., Any],
    *args: Any,
    kind: str = "cpu",
    backend: str = "gloo",
    threads: int | None = None,
    deadline_s: float = 120.0,
    report: Report = lambda text: None,
) -> list[Any]:
    """Return what ``function(rank, *args)`` gave in each of ``size`` processes.

    On a CPU they are forked, from a process that has used no thread of torch's yet; elsewhere they start afresh, for a
    device that has been used cannot be taken into a fork.

    Args:
        backend: "" where the processes need not meet.
        threads: None: this machine's cores shared out.

    Raises:
        RuntimeError: a rank raised (its traceback is in the message), died, or took longer than ``deadline_s``.
    """
    context = multiprocessing.get_context("fork" if kind == "cpu" else "spawn")
    threads = threads or max(1, len(os.sched_getaffinity(0)) // size)
    pipes, processes = [], []
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        try:
            for number in range(size):
                near, far = context.Pipe()
                rank = Rank(number, size, kind, backend, threads, far)
                process = context.Process(target=_work, args=(rank, folder, function, args), daemon=True)  # type: ignore[attr-defined]
                process.start()
                far.close()
                pipes.append(near)
                processes.append(process)
            return _answers(pipes, deadline_s, report)
        finally:
            for pipe in pipes:
                pipe.close()
            for process in processes:
                if process.is_alive():
                    process.kill()
                process.join()


def _answers(pipes: list[Connection], deadline_s: float, report: Report) -> list[Any]:
    """Return one answer of each rank; the first failure ends the wait, for the others may hang."""
    answers: dict[int, Any] = {}
    end = time.monotonic() + deadline_s
    while len(answers) < len(pipes):
        waiting = [pipe for number, pipe in enumerate(pipes) if number not in answers]
        ready = wait(waiting, max(0.0, end - time.monotonic()))
        if not ready:
            missing = [number for number in range(len(pipes)) if number not in answers]
            raise RuntimeError(f"ranks must answer within {deadline_s:.0f} s, got nothing from {missing}")
        for pipe in ready:
            number = pipes.index(pipe)  # type: ignore[arg-type]
            try:
                what, value = pipes[number].recv()
            except (EOFError, ConnectionResetError):
                what, value = "failed", "it died"
            if what == "failed":
                raise RuntimeError(f"rank {number} of {len(pipes)}: {value}")
            if what == "told":
                report(value)
            else:
                answers[number] = value
    return [answers[number] for number in range(len(pipes))]


def _work(rank: Rank, folder: str, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    pipe = rank._pipe
    assert pipe is not None
    try:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        die_with_parent()
        os.environ.update(
            RANK=str(rank.number), LOCAL_RANK=str(rank.number), WORLD_SIZE=str(rank.size),
            LOCAL_WORLD_SIZE=str(rank.size), MASTER_ADDR="localhost", MASTER_PORT="0",
        )  # fmt: skip
        torch.set_num_threads(rank.threads)
        _ = rank.place
        if rank.backend:
            store = dist.FileStore(str(Path(folder) / "store"), rank.size)
            patience = timedelta(seconds=60)
            dist.init_process_group(rank.backend, store=store, rank=rank.number, world_size=rank.size, timeout=patience)
        answer = function(rank, *args)
        rank.meet()
        pipe.send(("answer", answer))
    except BaseException:
        pipe.send(("failed", "\n" + traceback.format_exc()))
    finally:
        pipe.close()
        os._exit(0)  # the others may be gone: no farewell over the wire
