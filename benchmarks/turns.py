"""Contenders in separate processes that take turns: while one is measured, the others wait.

A round consists of one turn of each contender. Speeds are compared within a round, so that a temporary slowdown of the
machine affects all contenders. ``Team`` manages the processes of one contender; ``rates_in_turns`` takes turns within
one process. ``measurement_info`` returns the conditions of a measurement.

torch is imported only by teams that need it, because the start and the memory of processes without it are measured,
too.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import platform
import shlex
import statistics
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from importlib import metadata
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

ANSWER_TIMEOUT_S, EXIT_TIMEOUT_S = 3600.0, 20.0
"""Seconds to wait for an answer of a process, and for its end."""


@dataclass(frozen=True)
class Failure:
    """An answer that contains a traceback."""

    message: str


class Team:
    """The processes of one contender. While they wait, they block in a read from a pipe, without processor time.

    Args:
        name: name of the contender, for messages.
        worker: class or function that each process calls with ``args`` and its index; ``ask`` calls methods of the
            returned object.
        start_method: method of ``multiprocessing``. A forked process starts with the memory of this process.
        has_group: the processes are ranks of one gloo process group, with a rendezvous by file.
        threads: threads of torch in each process; 0 for torch's default.
    """

    def __init__(
        self,
        name: str,
        worker: Callable[..., Any],
        args: Sequence[Any],
        *,
        size: int = 1,
        start_method: str = "spawn",
        has_group: bool = False,
        threads: int = 0,
    ) -> None:
        context: Any = multiprocessing.get_context(start_method)
        self.name = name
        self._folder = tempfile.TemporaryDirectory(prefix="megatron-team-")
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []
        for rank in range(size):
            parent_end, child_end = context.Pipe()
            store = Path(self._folder.name) / "store" if has_group else None
            process = context.Process(target=_serve, args=(child_end, worker, tuple(args), rank, size, store, threads))
            process.start()
            child_end.close()
            self._pipes.append(parent_end)
            self._processes.append(process)

    def ready(self) -> list[Any]:
        """Wait until every process has its worker; raises like ``ask``."""
        return self._answers()

    def ask(self, method_name: str, *args: Any) -> list[Any]:
        """Call the method ``method_name`` of every worker and return the answers.

        Raises:
            RuntimeError: a process failed, died or did not answer within ``ANSWER_TIMEOUT_S``; the message has the
                traceback.
        """
        for pipe in self._pipes:
            with contextlib.suppress(OSError):  # a process that ended has left its traceback, or is reported below
                pipe.send((method_name, args))
        return self._answers()

    def close(self) -> None:
        """End every process, by SIGKILL if necessary; a second call has no effect."""
        for pipe in self._pipes:
            with contextlib.suppress(OSError):
                pipe.send(None)
        for process in self._processes:
            process.join(EXIT_TIMEOUT_S)
            if process.is_alive():
                process.kill()
                process.join()
        for pipe in self._pipes:
            pipe.close()
        self._folder.cleanup()

    def _answers(self) -> list[Any]:
        """Return one answer per process. The first failure ends the wait, because the other processes may hang."""
        answers: dict[int, Any] = {}
        while len(answers) < len(self._pipes):
            missing = [rank for rank in range(len(self._pipes)) if rank not in answers]
            ready_pipes = wait([self._pipes[rank] for rank in missing], ANSWER_TIMEOUT_S)
            if not ready_pipes:
                raise RuntimeError(f'"{self.name}": ranks {missing} must answer within {ANSWER_TIMEOUT_S:g} s')
            for pipe in ready_pipes:
                rank = self._pipes.index(pipe)  # type: ignore[arg-type]
                try:
                    answers[rank] = self._pipes[rank].recv()
                except (EOFError, ConnectionResetError):
                    answers[rank] = Failure("died")
                if isinstance(answers[rank], Failure):
                    raise RuntimeError(f'"{self.name}", rank {rank}: {answers[rank].message}')
        return [answers[rank] for rank in range(len(self._pipes))]


def _serve(
    pipe: Connection, worker: Callable[..., Any], args: tuple[Any, ...], rank: int, size: int, store: Path | None,
    threads: int,
) -> None:  # fmt: skip
    """Create the worker and answer requests until None is received. After an exception, send its traceback and exit.

    stdout is redirected to keep the output of engines out of the tables; stderr is not.
    """
    try:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - for the life of the process
        os.dup2(sys.stdout.fileno(), 1)
        if threads:
            import torch

            torch.set_num_threads(threads)
        if store is not None:
            import torch.distributed as dist

            os.environ.update(
                RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size), LOCAL_WORLD_SIZE=str(size),
                MASTER_ADDR="localhost", MASTER_PORT="0", DS_ACCELERATOR="cpu",
            )  # fmt: skip
            timeout = timedelta(seconds=ANSWER_TIMEOUT_S)
            store_handle = dist.FileStore(str(store), size)
            dist.init_process_group("gloo", store=store_handle, rank=rank, world_size=size, timeout=timeout)
        worker_object = worker(*args, rank)
        pipe.send(None)
        while (request := pipe.recv()) is not None:
            method, method_args = request
            pipe.send(getattr(worker_object, method)(*method_args))
    except (EOFError, BrokenPipeError, KeyboardInterrupt):
        return
    except BaseException:
        pipe.send(Failure(traceback.format_exc()))
    finally:
        sys.stderr.flush()
        os._exit(0)  # without a shutdown of communication, which could hang because other processes have ended


def rotated(names: Iterable[str], round_idx: int) -> list[str]:
    """Return the order of the contenders in round ``round_idx``."""
    names = list(names)
    shift = round_idx % max(1, len(names))
    return names[shift:] + names[:shift]


# Turns within one process, and statistics of rates: medians over rounds, ratios within rounds.

Turn = Callable[[], float]
"""Function that takes one turn and returns the rate in units of work per second."""


@dataclass(frozen=True)
class Bar:
    """A required value and the measured quartiles over rounds; the median must meet the requirement."""

    name: str
    quartiles: tuple[float, float, float]
    at_least: float | None = None
    at_most: float | None = None

    @property
    def is_met(self) -> bool:
        middle = self.quartiles[1]
        is_enough = self.at_least is None or middle >= self.at_least
        return is_enough and (self.at_most is None or middle <= self.at_most)

    @property
    def text(self) -> str:
        low, middle, high = self.quartiles
        bound = f"at least {self.at_least:g}" if self.at_least is not None else f"at most {self.at_most:g}"
        verdict = "met" if self.is_met else "NOT MET"
        spread = f" (quartiles {low:.3f}, {high:.3f})" if low != high else ""
        return f"{verdict:8}{middle:10.5g}, {bound:13} {self.name}{spread}"


def rates_in_turns(turns: Mapping[str, Turn], rounds: int) -> dict[str, list[float]]:
    """Return the rates of each contender, one for each round; the order rotates from round to round."""
    rates: dict[str, list[float]] = {name: [] for name in turns}
    for round_idx in range(rounds):
        for name in rotated(turns, round_idx):
            rates[name].append(turns[name]())
    return rates


def ratio_quartiles(ours: Sequence[float], other: Sequence[float]) -> tuple[float, float, float]:
    """Return lower quartile, median and upper quartile of the ratio ours / other by round."""
    return quartiles([a / b for a, b in zip(ours, other, strict=True)])


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Return lower quartile, median and upper quartile; all are equal for a single value."""
    if len(values) < 2:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


def measurement_info() -> dict[str, Any]:
    """Return the command, commit, versions and processor."""
    from megatron.training.run_record import git_commit

    return {
        "command": shlex.join(["python", *sys.argv]),
        "commit": git_commit(),
        "versions": {name: _version(name) for name in ("torch", "deepspeed", "transformers")},
        "python": platform.python_version(),
        "processor": cpu_name(),
    }


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def cpu_name() -> str:
    """Return the processor's name if the system reports it, otherwise the machine type."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
