"""What ``pipeline.py`` compares, and the processes of the contenders, which stay for a whole case.

A rank waits on its pipe while the others run, and does what the pipe brings. It waits in a read of the pipe, so it uses
no processor meanwhile. When the pipe closes it ends.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

from benchmarks.sizes import GPTSizes, Sizes, T5Sizes

Bounds = tuple[int, ...]
MOST_KEPT = 128
"""Micro-batches times layers whose activations one contender may keep."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One comparison, all of whose contenders take turns.

    Args:
        bar: speed that ours must reach, as a part of two one-process runs side by side; None: reported without bars.
        balance: how much longer than the shortest the longest stage of our best may take, as measured ahead.
        loss_tolerance: how far apart the losses of contenders may be in their first steps.
    """

    name: str
    sizes: Sizes = field(default_factory=GPTSizes)
    micro_batch_size: int = 4
    num_micro_batches: int = 8
    num_stages: int = 2
    tensor: int = 1
    bar: float | None = None
    balance: float | None = None
    loss_tolerance: float = 1e-5

    @property
    def tokens(self) -> int:
        """Tokens of one step."""
        return self.sizes.tokens_per_sample * self.micro_batch_size * self.num_micro_batches

    @property
    def has_gpipe(self) -> bool:
        """Whether GPipe takes part: where it keeps gigabytes, 24 GiB are not enough for all contenders together."""
        return self.num_micro_batches * self.sizes.num_layers <= MOST_KEPT


@dataclass(frozen=True, kw_only=True)
class Contender:
    """Who trains it, and how.

    Args:
        kind: "alone", "side by side", "stock", "dualpipev", "torch" or "ours".
        layers: as in ``model.make_model``.
        partition: bounds, or the name of a method of the engine's.
        keeps_freed: let the allocator keep freed memory; our engine does so by itself.
    """

    name: str
    kind: str
    layers: str = "half"
    partition: Bounds | str = ()
    schedule: str = "1f1b"
    chunks: int = 1
    keeps_freed: bool = False

    @property
    def num_trials(self) -> int:
        """How many steps it takes before it runs as it will: "auto" tries schedules first."""
        return 4 if self.schedule == "auto" else 0

    def num_ranks(self, case: Case) -> int:
        """Return how many processes it runs in."""
        if self.kind in ("alone", "side by side"):
            return 1 if self.kind == "alone" else case.num_stages * case.tensor
        return case.num_stages * case.tensor


MAIN = GPTSizes(num_layers=8, hidden_size=256, num_attention_heads=8, vocab_size=8192, seq_length=256)
DEEP = replace(MAIN, num_layers=16, vocab_size=4096)
SMALL = GPTSizes(num_layers=3, hidden_size=32, num_attention_heads=4, vocab_size=64, seq_length=16)
T5_MAIN = T5Sizes(num_layers=8, hidden_size=256, num_attention_heads=8, vocab_size=11776, enc_seq_length=256)
"""With this vocabulary the decoder's side and the head make up for what the encoder's layers leave over."""
T5_LOSS_TOLERANCE = 5e-5
"""Stages add up the gradients of tied tables in another order, which Adam's first steps blow up."""
T5_SMALL = T5Sizes(num_layers=2, hidden_size=32, num_attention_heads=4, vocab_size=256, enc_seq_length=16)
KINDS = {"gpt2": ("main", "deep", "tensor"), "t5": ("main",)}


def cases_of(model: str, kinds: Sequence[str], micro_batches: Sequence[int], *, is_smoke: bool) -> list[Case]:
    """Return the cases of ``kinds``, in the order of their running; the main one with each number of micro-batches."""
    batch = 2 if is_smoke else 4
    if model == "t5":
        sizes = T5_SMALL if is_smoke else T5_MAIN
        t5 = Case(name="t5", sizes=sizes, micro_batch_size=batch, balance=0.03, loss_tolerance=T5_LOSS_TOLERANCE)
        return [replace(t5, name=f"t5 m={m}", num_micro_batches=m, bar=_at_8(m, 0.85)) for m in micro_batches]
    main, deep = (SMALL, replace(SMALL, num_layers=4)) if is_smoke else (MAIN, DEEP)
    found = []
    if "main" in kinds:
        case = Case(name="main", sizes=main, micro_batch_size=batch)
        found += [replace(case, name=f"m={m}", num_micro_batches=m, bar=_at_8(m, 0.93)) for m in micro_batches]
    if "deep" in kinds:
        found.append(Case(name="deep m=16", sizes=deep, micro_batch_size=batch, num_micro_batches=16, bar=0.94))
    if "tensor" in kinds:
        found.append(Case(name="tensor m=8", sizes=main, micro_batch_size=batch, num_micro_batches=8, tensor=2))
    return found


def _at_8(num_micro_batches: int, bar: float) -> float | None:
    return bar if num_micro_batches == 8 else None


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
        from benchmarks.pipe.model import build

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
        from benchmarks.pipe.cuts import record_steps

        batches = [self.built.model.batches(self.case, order.step + i) for i in range(order.num_steps)]
        self._meet()
        return record_steps(self.built.engine, batches)

    def cut(self, order: Order) -> tuple[int, ...]:
        """Return the bounds by which the engine has cut the model; none where nobody cuts."""
        return tuple(int(bound) for bound in getattr(self.built.part, "parts", self.contender.partition))

    def layers(self, order: Order) -> list[float]:
        """Return seconds of each layer, forward and backward, for one micro-batch; the loss counts to the last."""
        from benchmarks.pipe.cuts import seconds_by_profile, seconds_of_layers

        if self.contender.partition == "profile":
            return seconds_by_profile(self.built.part)
        return seconds_of_layers(self.built.part, self.built.model, self.built.model.batches(self.case, 0)[0])

    def profile(self, order: Order) -> str:
        """Take steps under Python's profiler; return the table of where the time went."""
        from benchmarks.pipe.cuts import hot_spots

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

    from benchmarks.pipe.model import Seat

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


START_METHODS = ("forkserver", "spawn", "fork")
FAREWELL_S = 5.0
PRELOADED = ["torch.distributed.pipelining", "benchmarks.memory", "benchmarks.pipe.model", "tds"]
"""What the server that forks them imports once: a process is then ready in a fraction of a second."""


class Team:
    """The ranks of one contender."""

    def __init__(self, case: Case, contender: Contender, context: Any, folder: str) -> None:
        self.contender = contender
        self.pipes: list[Connection] = []
        self.processes = []
        self.pids: list[int] = []
        for rank in range(contender.num_ranks(case)):
            near, far = context.Pipe()
            process = context.Process(target=work, args=(case, contender, rank, folder, far), daemon=True)
            process.start()
            far.close()
            self.pipes.append(near)
            self.processes.append(process)

    def ready(self) -> None:
        """Wait until every rank is built."""
        self.pids = self._answers()

    def ask(self, order: Order) -> list[Any]:
        """Give ``order`` to every rank and return their answers.

        Raises:
            RuntimeError: a rank failed or died; its traceback is in the message.
        """
        for pipe in self.pipes:
            with contextlib.suppress(OSError):  # one that has gone left its traceback, or is missed below
                pipe.send(order)
        return self._answers()

    def close(self) -> None:
        """End every rank, by force where it does not go."""
        for pipe in self.pipes:
            with contextlib.suppress(OSError):
                pipe.send(None)
        for process in self.processes:
            process.join(FAREWELL_S)
            if process.is_alive():
                process.kill()
                process.join()
        for pipe in self.pipes:
            pipe.close()

    def _answers(self) -> list[Any]:
        """Return one answer of each rank; the first failure ends the wait, for the others may hang."""
        answers: dict[int, Any] = {}
        while len(answers) < len(self.pipes):
            for pipe in wait([pipe for rank, pipe in enumerate(self.pipes) if rank not in answers]):
                rank = self.pipes.index(pipe)  # type: ignore[arg-type]
                try:
                    answers[rank] = self.pipes[rank].recv()
                except (EOFError, ConnectionResetError):
                    answers[rank] = Failure("died")
                if isinstance(answers[rank], Failure):
                    raise RuntimeError(f'"{self.contender.name}", rank {rank}: {answers[rank].told}')
        return [answers[rank] for rank in range(len(self.pipes))]


@contextmanager
def assembled(case: Case, contenders: Sequence[Contender], start_method: str) -> Iterator[dict[str, Team]]:
    """Yield a team for each contender, by name; afterwards none of their processes is left."""
    context = prepared(start_method)
    teams: dict[str, Team] = {}
    with tempfile.TemporaryDirectory(prefix="pipeline-benchmark-") as place:
        try:
            for index, contender in enumerate(contenders):
                folder = os.path.join(place, str(index))
                os.mkdir(folder)
                teams[contender.name] = Team(case, contender, context, folder)
                teams[contender.name].ready()
            yield teams
        finally:
            for team in teams.values():
                team.close()


def prepared(start_method: str) -> Any:
    """Return the way to start processes: one thread each, and from a server that has imported torch already."""
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["DS_ACCELERATOR"] = "cpu"
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # the profiler that counts memory is talkative
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    context = multiprocessing.get_context(start_method)
    if start_method == "forkserver":
        context.set_forkserver_preload(PRELOADED)
    return context
