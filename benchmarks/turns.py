"""Contenders in processes of their own that take turns: while one is measured, the others wait.

A turn of each makes a round. Speeds of one round are compared with one another, so that a machine that is slower for a
while is slower for all; each process also tells its own peak of memory.
"""

from __future__ import annotations

import contextlib
import importlib
import math
import multiprocessing
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

from benchmarks.sizes import Sizes

PRODUCT = "matrix product"
LOOK = "look"
"""In place of a step's number: take one under the profiler, and tell what was seen."""
MODULES = {
    "gpt2": "benchmarks.contenders",
    "t5": "benchmarks.t5_contenders",
    "llama": "benchmarks.llama_contenders",
}
"""Family -> where its contenders are."""
PRODUCTS = {"cpu": (2048, 8)}
"""Kind of device -> side of the square matrices, and products in a turn."""
PRODUCTS_ELSEWHERE = (8192, 50)
"""On a GPU, where smaller ones are over before their starts are: they would make a base that MFU is above."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """What every contender does.

    Args:
        product_side: of the matrices that are multiplied; 0: what suits the kind of device.
    """

    sizes: Sizes
    batch_size: int
    steps: int
    kind: str
    dtype: str
    threads: int
    product_side: int = 0


@dataclass
class Record:
    """What one contender told: seconds of each turn, the loss of the first step and after each turn, bytes.

    Args:
        cpu_s: processor time of each turn, over all threads; with one thread it says something on a busy machine too.
        reserved_bytes: the most that the device's allocator has held, free room between tensors included; 0 on a CPU.
        looked: what ``benchmarks.looking.look`` has found in one more step, of those who were asked.
        compile_s: in which torch.compile was waited for, the turn that warms up included.
    """

    turns_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    first_loss: float = math.nan
    peak_bytes: int = 0
    idle_bytes: int = 0
    compile_s: float = 0.0
    reserved_bytes: int = 0
    looked: dict[str, Any] = field(default_factory=dict)


def products_of(kind: str, product_side: int = 0) -> tuple[int, int]:
    """Return the side of the square matrices on this kind of device, and how many products a turn has."""
    side, number = PRODUCTS.get(kind, PRODUCTS_ELSEWHERE)
    return product_side or side, number


def take_turns(
    names: Sequence[str], work: Work, rounds: int, start_method: str = "spawn", look_at: Sequence[str] = ()
) -> dict[str, Record]:
    """Return a record for each contender and for the matrix product; the first turn warms up and is not in it.

    Args:
        start_method: of ``multiprocessing``. A forked process starts with the memory of this one.
        look_at: contenders that take one more step at the end, under the profiler.

    Raises:
        RuntimeError: a contender failed; its traceback is the message.
    """
    context = multiprocessing.get_context(start_method)
    pipes: dict[str, Connection] = {}
    workers = []
    try:
        for name in [*names, PRODUCT]:
            pipes[name], far = context.Pipe()
            workers.append(context.Process(target=_work, args=(name, work, far), daemon=True))
            workers[-1].start()
            far.close()
        records = {name: Record(idle_bytes=_answer(name, pipe)) for name, pipe in pipes.items()}
        for number in range(rounds + 1):
            order = list(pipes)
            shift = number % len(order)
            for name in order[shift:] + order[:shift]:
                pipes[name].send(number * work.steps)
                seconds, cpu_s, losses, peak, reserved, records[name].compile_s = _answer(name, pipes[name])
                records[name].losses.append(losses[-1])
                records[name].peak_bytes, records[name].reserved_bytes = peak, reserved
                if number == 0:
                    records[name].first_loss = losses[0]
                else:
                    records[name].turns_s.append(seconds)
                    records[name].cpu_s.append(cpu_s)
        for name in look_at:
            pipes[name].send(LOOK)
            records[name].looked = _answer(name, pipes[name])
        return records
    finally:
        for pipe in pipes.values():
            _dismiss(pipe)
        for worker in workers:
            worker.join(timeout=20.0)


def _answer(name: str, pipe: Connection) -> Any:
    try:
        result = pipe.recv()
    except EOFError:
        raise RuntimeError(f"{name} died") from None
    if isinstance(result, str):
        raise RuntimeError(f"{name} failed:\n{result}")
    return result


def _dismiss(pipe: Connection) -> None:
    """Tell a worker to end; one that has died already hears nothing."""
    with contextlib.suppress(OSError):
        pipe.send(None)
    pipe.close()


def _work(name: str, work: Work, pipe: Connection) -> None:
    """Build one contender and step at each number that the pipe brings, until it brings None."""
    try:
        import torch

        from megatron import device

        torch.set_num_threads(work.threads)
        turn = _product(work) if name == PRODUCT else _contender(name, work)
        pipe.send(device.peak_memory_bytes(work.kind))
        while (first := pipe.recv()) is not None:
            if first == LOOK:
                from benchmarks.looking import look

                pipe.send(_looked(lambda: look(lambda: turn(0, 1), work.kind)))
                continue
            device.synchronize(work.kind)
            start, cpu_start = time.perf_counter(), time.process_time()
            losses = [float(loss) for loss in turn(first)]
            device.synchronize(work.kind)
            seconds, cpu_s = time.perf_counter() - start, time.process_time() - cpu_start
            memory = device.peak_memory_bytes(work.kind), _reserved_bytes(work.kind)
            pipe.send((seconds, cpu_s, losses, *memory, _compile_s(name)))
    except EOFError:
        return
    except Exception:
        pipe.send(traceback.format_exc())


def _looked(look: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return what was seen; where there is no profiler that works, why: the times that were measured still count."""
    try:
        return look()
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}


def _reserved_bytes(kind: str) -> int:
    import torch

    return 0 if kind == "cpu" else torch.accelerator.max_memory_reserved()


def _compile_s(name: str) -> float:
    if not name.endswith("-compiled"):
        return 0.0
    from megatron.training.compile import compiled_here

    return compiled_here().seconds


def _contender(name: str, work: Work) -> Any:
    module = MODULES[work.sizes.family]
    step = importlib.import_module(module).CONTENDERS[name](work.sizes, work.batch_size, work.kind, work.dtype)

    def turn(first: int, steps: int = work.steps) -> list[Any]:
        return [step(work.sizes.batch(work.batch_size, number)) for number in range(first, first + steps)]

    return turn


def _product(work: Work) -> Any:
    """Return a turn of matrix products: its rate is what MFU is a part of."""
    import torch

    from megatron import device

    place, (side, number) = device.bind(work.kind, 0), products_of(work.kind, work.product_side)
    a, b = (torch.randn(side, side, device=place, dtype=device.DTYPES[work.dtype]) for _ in range(2))
    out = torch.empty_like(a)

    def turn(_: int) -> list[float]:
        for _ in range(number):
            torch.mm(a, b, out=out)
        return [0.0]

    return turn
