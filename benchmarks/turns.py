"""Contenders in processes of their own that take turns: while one is measured, the others wait.

A turn of each makes a round. Speeds of one round are compared with one another, so that a machine that is slower for a
while is slower for all; each process also tells its own peak of memory. ``rates_in_turns`` does the same in one
process, with whatever is measured.
"""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import re
import statistics
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch.nn.attention import SDPBackend
from torch.overrides import TorchFunctionMode
from torch.profiler import ProfilerActivity, profile

from benchmarks.sizes import Sizes
from megatron import device

PRODUCT = "matrix product"
LOOK = "look"
"""In place of a step's number: take one under the profiler, and tell what was seen."""
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
        looked: what ``look`` has found in one more step, of those who were asked.
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
        torch.set_num_threads(work.threads)
        turn = _product(work) if name == PRODUCT else _contender(name, work)
        pipe.send(device.peak_memory_bytes(work.kind))
        while (first := pipe.recv()) is not None:
            if first == LOOK:
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
    return 0 if kind == "cpu" else torch.accelerator.max_memory_reserved()


def _compile_s(name: str) -> float:
    if not name.endswith("-compiled"):
        return 0.0
    from megatron.training.compile import compiled_here

    return compiled_here().seconds


def _contender(name: str, work: Work) -> Any:
    from benchmarks.contenders import CONTENDERS  # models and all: this process alone may hold them

    step = CONTENDERS[work.sizes.family][name](work.sizes, work.batch_size, work.kind, work.dtype)

    def turn(first: int, steps: int = work.steps) -> list[Any]:
        return [step(work.sizes.batch(work.batch_size, number)) for number in range(first, first + steps)]

    return turn


def _product(work: Work) -> Any:
    """Return a turn of matrix products: its rate is what MFU is a part of."""
    place, (side, number) = device.bind(work.kind, 0), products_of(work.kind, work.product_side)
    a, b = (torch.randn(side, side, device=place, dtype=device.DTYPES[work.dtype]) for _ in range(2))
    out = torch.empty_like(a)

    def turn(_: int) -> list[float]:
        for _ in range(number):
            torch.mm(a, b, out=out)
        return [0.0]

    return turn


# One step under torch's profiler: the kernels that take longest, and which attention torch chose.
#
# Kernels are what ran on the device; on a CPU, which has none, its operators. An operator's own time on the device is
# that of the kernels that it starts, so the two are never summed together.

SHOWN = 10
LONGEST_NAME = 160
ATTENTION = re.compile(r"flash|fmha|sdpa|attention", re.IGNORECASE)
"""In the names of the kernels of all of torch's fused attentions, forward and backward."""


def look(step: Callable[[], Any], kind: str) -> dict[str, Any]:
    """Take one step and return what it is spent on.

    ``kernels`` are the longest ones with name, milliseconds, share of all kernels' time and calls; ``kernels_ms`` is
    all of them; ``attention_kernels`` are the names of those of attention; ``attention`` is what torch chose for each
    shape, as torch._fused_sdp_choice says.
    """
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if kind == "cuda" else [])]
    with _Attention() as seen, profile(activities=activities) as taken:
        step()
        if kind == "cuda":
            torch.cuda.synchronize()
    return {**kernels_of(taken.key_averages(), kind), "attention": seen.as_data()}


def kernels_of(averages: Iterable[Any], kind: str) -> dict[str, Any]:
    """Return ``kernels``, ``kernels_ms`` and ``attention_kernels`` of a profile's ``key_averages()``."""
    on_cpu = torch.autograd.DeviceType.CPU
    times = [
        (each.key, each.self_cpu_time_total if kind == "cpu" else each.self_device_time_total, each.count)
        for each in averages
        if (each.device_type == on_cpu) == (kind == "cpu") and not each.is_user_annotation
    ]
    times.sort(key=lambda each: (-each[1], each[0]))
    whole = sum(time for _, time, _ in times)
    kernels = [
        {"name": name[:LONGEST_NAME], "ms": time / 1e3, "share": time / whole if whole else 0.0, "count": count}
        for name, time, count in times[:SHOWN]
    ]
    attention = [name[:LONGEST_NAME] for name, _, _ in times if ATTENTION.search(name)]
    return {"kernels": kernels, "kernels_ms": whole / 1e3, "attention_kernels": attention}


class _Attention(TorchFunctionMode):
    """Notes for each call of torch's attention what torch chooses for it; the call goes on as it is."""

    def __init__(self) -> None:
        super().__init__()
        self._calls: Counter[tuple[Any, ...]] = Counter()

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        if function is torch.nn.functional.scaled_dot_product_attention:
            query, key = args[0], args[1]
            chosen = SDPBackend(torch._fused_sdp_choice(*args, **given)).name
            has_mask = (given.get("attn_mask") if len(args) < 4 else args[3]) is not None
            self._calls[chosen, tuple(query.shape), tuple(key.shape), str(query.dtype), has_mask] += 1
        return function(*args, **given)

    def as_data(self) -> list[dict[str, Any]]:
        return [
            {"kernel": kernel, "query": list(query), "key": list(key), "dtype": dtype, "has_mask": mask, "calls": calls}
            for (kernel, query, key, dtype, mask), calls in self._calls.items()
        ]


# Turns in one process, and what rates say: medians over rounds, ratios within them.

Turn = Callable[[], float]
"""Does one turn and returns what was measured: units of work a second."""


@dataclass(frozen=True)
class Bar:
    """A ratio that must be reached, and what was found: quartiles over rounds.

    Args:
        by_cpu: the median of the same by processor time, where that was taken: it says something on a busy machine too.
    """

    name: str
    at_least: float
    quartiles: tuple[float, float, float]
    by_cpu: float | None = None

    @property
    def is_met(self) -> bool:
        """Whether the median reaches it."""
        return self.quartiles[1] >= self.at_least

    @property
    def text(self) -> str:
        low, middle, high = self.quartiles
        verdict = "met" if self.is_met else "NOT MET"
        cpu = "" if self.by_cpu is None else f", by CPU time {self.by_cpu:.2f}"
        ratio = f"{middle:9.2f} (quartiles {low:.2f}, {high:.2f}{cpu})"
        return f"{self.name:50}{ratio}  at least {self.at_least:g}: {verdict}"


def rates_in_turns(turns: Mapping[str, Turn], rounds: int) -> dict[str, list[float]]:
    """Return the rates of each contender, one for each round; the order rotates from round to round."""
    rates: dict[str, list[float]] = {name: [] for name in turns}
    names = list(turns)
    for number in range(rounds):
        shift = number % len(names)
        for name in names[shift:] + names[:shift]:
            rates[name].append(turns[name]())
    return rates


def ratio_quartiles(ours: Sequence[float], theirs: Sequence[float]) -> tuple[float, float, float]:
    """Return lower quartile, median and upper quartile of how many times as fast ours is, round by round."""
    return quartiles([a / b for a, b in zip(ours, theirs, strict=True)])


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Return lower quartile, median and upper quartile; of one value it is all three."""
    if len(values) < 2:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high
