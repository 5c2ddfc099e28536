"""The replicas of one contender, in processes of their own that step when they are told to."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
import traceback
import warnings
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.memory import bytes_alive, measure
from benchmarks.zero_team import Case, Contender, build

PATIENCE_S = 600.0


class Team:
    """The processes of ``contender``; they wait in a pipe between two turns."""

    def __init__(self, contender: Contender, case: Case, threads: int, start_method: str) -> None:
        self.contender = contender
        self._place = tempfile.TemporaryDirectory(prefix="megatron-zero-")
        context = multiprocessing.get_context(start_method)
        self._pipes: list[Connection] = []
        self._ranks: list[Any] = []
        for rank in range(case.replicas):
            near, far = context.Pipe()
            args = (contender, case, rank, threads, Path(self._place.name), far)
            self._ranks.append(context.Process(target=_rank, args=args, daemon=True))  # type: ignore[attr-defined]
            self._ranks[-1].start()
            far.close()
            self._pipes.append(near)

    def hear(self) -> list[Any]:
        """Return what each rank tells.

        Raises:
            RuntimeError: one failed; its traceback is the message.
        """
        told = []
        for rank, pipe in enumerate(self._pipes):
            if not pipe.poll(PATIENCE_S):
                raise RuntimeError(f"{self.contender.name}: rank {rank} did not answer within {PATIENCE_S:g} s")
            try:
                told.append(pipe.recv())
            except EOFError:
                told.append(f"rank {rank} died")
        failures = [each for each in told if isinstance(each, str)]
        if failures:
            raise RuntimeError(f"{self.contender.name}: {failures[0]}")
        return told

    def ask(self, what: str, first: int, number: int) -> list[Any]:
        """Let the ranks take ``number`` steps from step ``first``, or measure the memory of one; see ``hear``."""
        for pipe in self._pipes:
            pipe.send((what, first, number))
        return self.hear()

    def dismiss(self) -> None:
        """Let the processes end."""
        for pipe in self._pipes:
            with suppress(OSError):
                pipe.send(None)
            pipe.close()
        for process in self._ranks:
            process.join(timeout=20.0)
            if process.is_alive():
                process.kill()
        self._place.cleanup()


def _rank(contender: Contender, case: Case, rank: int, threads: int, place: Path, pipe: Connection) -> None:
    try:
        os.environ.update(
            RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(case.replicas), LOCAL_WORLD_SIZE=str(case.replicas),
            MASTER_ADDR="localhost", MASTER_PORT="0", DS_ACCELERATOR="cpu",
        )  # fmt: skip
        torch.set_num_threads(threads)
        inherited = bytes_alive()  # a forked process has what its parent had
        warnings.simplefilter("ignore", FutureWarning)  # of torch, about names that DeepSpeed uses
        store = dist.FileStore(str(place / "store"), case.replicas)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=case.replicas)
        step = build(contender, case, rank)
        pipe.send(b"ready")
        while (order := pipe.recv()) is not None:
            what, first, number = order
            pipe.send(_timed(step, first, number) if what == "steps" else _memory(step, first, inherited))
    except EOFError:
        return
    except BaseException:
        pipe.send(traceback.format_exc())


def _timed(step: Any, first: int, number: int) -> tuple[float, float, list[float]]:
    """Return seconds, processor seconds and the losses."""
    dist.barrier()
    start, cpu = time.perf_counter(), time.process_time()
    losses = [step(each) for each in range(first, first + number)]
    return time.perf_counter() - start, time.process_time() - cpu, losses


def _memory(step: Any, first: int, inherited: int) -> tuple[int, int]:
    """Return the bytes that are kept between steps, and the most that a step adds."""
    kept, added = measure(lambda: step(first))
    return kept - inherited, added
