"""Run a function in several processes of this machine, as ranks of a process group.

``run_ranks(n, function, *args)`` calls ``function(rank, *args)`` in each process and returns the results in rank order.
Messages of ``Rank.report`` are delivered to the caller immediately. The ranks rendezvous through a file, so no port is
needed. Processes never outlive the call: they are joined, or killed after the deadline, and they die with their parent.
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
    """One process: its rank, the process count, and the device.

    Args:
        device_type, backend: device type, and backend of torch.distributed; "" for no process group.
        threads: torch threads, on a CPU.
    """

    idx: int
    size: int
    device_type: str
    backend: str
    threads: int
    _pipe: Connection | None = field(default=None, compare=False)

    @property
    def device(self) -> torch.device:
        return device.bind(self.device_type, self.idx)

    def report(self, text: str) -> None:
        """Send the progress message ``text`` to the caller. Has no effect on ranks other than 0."""
        if self.idx == 0 and self._pipe is not None:
            self._pipe.send(("told", text))

    def barrier(self) -> None:
        """Wait for all ranks. Collective."""
        if self.backend:
            dist.barrier()

    def max_over_ranks(self, value: float) -> float:
        """Return the maximum over all ranks. Collective."""
        return self._all_reduce(value, dist.ReduceOp.MAX)

    def sum_over_ranks(self, value: float) -> float:
        """Return the sum over all ranks. Collective."""
        return self._all_reduce(value, dist.ReduceOp.SUM)

    def _all_reduce(self, value: float, op: Any) -> float:
        if not self.backend:
            return value
        result = torch.tensor([value], dtype=torch.float64, device=self.device)
        dist.all_reduce(result, op=op)
        return result.item()


def run_ranks(
    size: int,
    function: Callable[..., Any],
    *args: Any,
    device_type: str = "cpu",
    backend: str = "gloo",
    threads: int | None = None,
    deadline_s: float = 120.0,
    report: Report = lambda text: None,
) -> list[Any]:
    """Run ``function(rank, *args)`` in ``size`` processes and return the results in rank order.

    On a CPU the processes are forked from this one, which must not have used torch's threads. For other devices they
    are spawned, since a device that has been used does not survive a fork.

    Args:
        backend: "" if the processes need no process group.
        threads: threads per process; None divides this machine's cores among the processes.

    Raises:
        RuntimeError: a rank raised (its traceback is in the message), died, or took longer than ``deadline_s``.
    """
    context = multiprocessing.get_context("fork" if device_type == "cpu" else "spawn")
    threads = threads or max(1, len(os.sched_getaffinity(0)) // size)
    pipes, processes = [], []
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        try:
            for idx in range(size):
                parent_end, child_end = context.Pipe()
                rank = Rank(idx, size, device_type, backend, threads, child_end)
                process = context.Process(target=_run_rank, args=(rank, folder, function, args), daemon=True)  # type: ignore[attr-defined]
                process.start()
                child_end.close()
                pipes.append(parent_end)
                processes.append(process)
            return _collect_results(pipes, deadline_s, report)
        finally:
            for pipe in pipes:
                pipe.close()
            for process in processes:
                if process.is_alive():
                    process.kill()
                process.join()


def _collect_results(pipes: list[Connection], deadline_s: float, report: Report) -> list[Any]:
    """Receive one result per rank. A failure is raised without waiting for other ranks, since they may be blocked."""
    results: dict[int, Any] = {}
    end = time.monotonic() + deadline_s
    while len(results) < len(pipes):
        waiting = [pipe for idx, pipe in enumerate(pipes) if idx not in results]
        ready = wait(waiting, max(0.0, end - time.monotonic()))
        if not ready:
            missing = [idx for idx in range(len(pipes)) if idx not in results]
            raise RuntimeError(f"all ranks must return within {deadline_s:.0f} s, got no result from ranks {missing}")
        for pipe in ready:
            idx = pipes.index(pipe)  # type: ignore[arg-type]
            try:
                message_type, value = pipes[idx].recv()
            except (EOFError, ConnectionResetError):
                message_type, value = "failed", "the process died"
            if message_type == "failed":
                raise RuntimeError(f"rank {idx} of {len(pipes)}: {value}")
            if message_type == "told":
                report(value)
            else:
                results[idx] = value
    return [results[idx] for idx in range(len(pipes))]


def _run_rank(rank: Rank, folder: str, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    pipe = rank._pipe
    assert pipe is not None
    try:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        die_with_parent()
        os.environ.update(
            RANK=str(rank.idx), LOCAL_RANK=str(rank.idx), WORLD_SIZE=str(rank.size),
            LOCAL_WORLD_SIZE=str(rank.size), MASTER_ADDR="localhost", MASTER_PORT="0",
        )  # fmt: skip
        torch.set_num_threads(rank.threads)
        _ = rank.device
        if rank.backend:
            store = dist.FileStore(str(Path(folder) / "store"), rank.size)
            timeout = timedelta(seconds=60)
            dist.init_process_group(rank.backend, store=store, rank=rank.idx, world_size=rank.size, timeout=timeout)
        result = function(rank, *args)
        rank.barrier()
        pipe.send(("answer", result))
    except BaseException:
        pipe.send(("failed", "\n" + traceback.format_exc()))
    finally:
        pipe.close()
        os._exit(0)  # skip the shutdown of the process group, since other ranks may already have ended
