"""One rank of one contender: a process that waits on its pipe while the others run, and does what the pipe brings.

It waits in a read of the pipe, so it uses no processor meanwhile. When the pipe closes it ends.
"""

from __future__ import annotations

import os
import sys
import time
import traceback
import warnings
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

from benchmarks.pipe.case import Case, Contender

PATIENCE = timedelta(minutes=10)


@dataclass(frozen=True)
class Order:
    """What the driver asks for: ``what`` is a method of ``Worker``, ``step`` the number of the first step."""

    what: str
    step: int = 0
    num_steps: int = 1


@dataclass(frozen=True)
class Failure:
    """An answer that is a traceback."""

    told: str


def work(case: Case, contender: Contender, rank: int, folder: str, pipe: Connection) -> None:
    """Build the contender's ``rank`` and answer orders until None comes; an exception is answered as its traceback.

    Args:
        folder: where the ranks of this contender find each other.
    """
    try:
        _be_quiet()
        worker = Worker(case, contender, rank, folder)
        pipe.send(os.getpid())
        while (order := pipe.recv()) is not None:
            pipe.send(getattr(worker, order.what)(order))
    except (EOFError, BrokenPipeError, KeyboardInterrupt):
        return
    except BaseException:
        pipe.send(Failure(traceback.format_exc()))
    finally:
        sys.stderr.flush()
        os._exit(0)  # the others may be gone: no farewell over the wire


class Worker:
    """The orders that a rank can follow."""

    def __init__(self, case: Case, contender: Contender, rank: int, folder: str) -> None:
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        self.case, self.rank, self.size = case, rank, contender.num_ranks(case)
        os.environ.update(
            RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(self.size), LOCAL_WORLD_SIZE=str(self.size),
            MASTER_ADDR="localhost", MASTER_PORT="0",
        )  # fmt: skip
        if self.size > 1:
            store = dist.FileStore(os.path.join(folder, "store"), self.size)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=self.size, timeout=PATIENCE)
        seat = make_seat(case, contender, rank)
        if contender.kind in ("stock", "dualpipev", "ours"):
            import tds

            tds.init_distributed("gloo", auto_mpi_discovery=False, verbose=False)
        from benchmarks.pipe.contenders import build

        self.contender, self.built = contender, build(contender, seat)

    def run(self, order: Order) -> dict[str, Any]:
        """Take steps; return their seconds, this rank's processor time, and the loss of each."""
        numbers = range(order.step, order.step + order.num_steps)
        batches = [self.built.model.batches(self.case, number) for number in numbers]
        self._meet()
        start, cpu_start = time.perf_counter(), time.process_time()
        losses = [self.built.step(each) for each in batches]
        seconds, cpu_s = time.perf_counter() - start, time.process_time() - cpu_start
        return {"seconds": seconds, "cpu_s": cpu_s, "losses": losses}

    def memory(self, order: Order) -> dict[str, int]:
        """Take a step; return the bytes of tensors before it, and the most that it adds."""
        from benchmarks.memory import measure

        batches = self.built.model.batches(self.case, order.step)
        self._meet()
        before, added = measure(lambda: self.built.step(batches))
        return {"before_bytes": before, "added_bytes": added}

    def costs(self, order: Order) -> Any:
        """Take steps of our engine; return what each was (``predict.Recorded``)."""
        from benchmarks.pipe.predict import record_steps

        batches = [self.built.model.batches(self.case, order.step + i) for i in range(order.num_steps)]
        self._meet()
        return record_steps(self.built.engine, batches)

    def cut(self, order: Order) -> tuple[int, ...]:
        """Return the bounds by which the engine has cut the model; none where nobody cuts."""
        return tuple(int(bound) for bound in getattr(self.built.part, "parts", self.contender.partition))

    def layers(self, order: Order) -> list[float]:
        """Return seconds of each layer, forward and backward, for one micro-batch; the loss counts to the last."""
        from benchmarks.pipe.probe import seconds_by_profile, seconds_of_layers

        if self.contender.partition == "profile":
            return seconds_by_profile(self.built.part)
        return seconds_of_layers(self.built.part, self.built.model, self.built.model.batches(self.case, 0)[0])

    def profile(self, order: Order) -> str:
        """Take steps under Python's profiler; return the table of where the time went."""
        from benchmarks.pipe.probe import hot_spots

        batches = [self.built.model.batches(self.case, order.step + i) for i in range(order.num_steps)]
        self._meet()
        return hot_spots(lambda: [self.built.step(each) for each in batches])

    def _meet(self) -> None:
        if self.size > 1:
            import torch.distributed as dist

            dist.barrier()


def make_seat(case: Case, contender: Contender, rank: int) -> Any:
    """Return the place of ``rank``; stages lie ``case.tensor`` ranks apart. Collective over the contender's ranks."""
    import torch.distributed as dist

    from benchmarks.pipe.contenders import Seat

    if contender.num_ranks(case) == 1 or contender.kind == "side by side" or case.tensor == 1:
        return Seat(case, rank, rank)
    from megatron.mpu.groups import build_grid
    from megatron.mpu.topology import Topology

    grid = build_grid(Topology(tensor=case.tensor, pipe=case.num_stages, data=1), rank)
    if dist.get_world_size() != case.num_stages * case.tensor:
        raise ValueError(f"{contender.name} needs {case.num_stages * case.tensor} ranks, got {dist.get_world_size()}")
    return Seat(case, rank, rank // case.tensor, grid.pipe.handle, grid.tensor)


def _be_quiet() -> None:
    """Keep what engines print and warn of out of the table: only errors are heard, on stderr."""
    warnings.simplefilter("ignore")
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - for the life of the process
    os.dup2(sys.stdout.fileno(), 1)
