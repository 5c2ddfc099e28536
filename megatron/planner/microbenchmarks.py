"""Measure matmuls, memory bandwidth and links of one device while the other ranks do the same."""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F

from megatron import device
from megatron.planner.machine import Link, Wire
from megatron.planner.reference import Reference, own_core_s, waits
from megatron.planner.spawn_ranks import Rank
from megatron.torch_compat import all_gather_single, reduce_scatter_single

# Rates of one device, measured while the other ranks do the same: matmuls, memory passes, updates, launches.
#
# | probe | one turn | counted |
# |---|---|---|
# | products | y = x Wᵀ, dx = dy W, dW = dyᵀ x, all square: the three matmuls of a linear layer | 6 side³ FLOPs |
# | stream | a sum, a norm and a GELU of activations, forward and backward | ``STREAM_PASSES`` times a tensor's bytes |
# | update | the norm of the gradients and torch's fused AdamW, in fp32 | 32 bytes per parameter: 5 read, 3 written |
# | overhead | a chain of small sums, forward and backward | two launches of a sum |
# | copy | from host memory to the device, and back | twice the bytes of the tensor |
#
# A turn is repeated for a time window. The result is the median rate of several windows. Warm-up turns before the first
# window exclude one-time costs (first touch of memory, selection of kernels).

SIDES = (64, 128, 256, 512, 1024, 2048, 4096, 8192)
LONGEST_TURN_S = 0.25
"""Upper bound for a turn of matmuls: larger sides are skipped if they would take longer, except ``LEAST_SIDE``."""
LEAST_SIDE = 512
STREAM_PASSES = (3 + 2 + 2) + (3 + 3 + 3)
"""Tensors read and written: by sum, norm, GELU; by the backward of GELU and norm, and the sum of two gradients."""
STREAM_WIDTH = 512
UPDATE_BYTES = 32
CHAIN = 200


@dataclass(frozen=True)
class TimingBudget:
    """Limits of the measurements: ``windows`` of ``window_s`` seconds per rate, and sizes up to the largest.

    Args:
        numbers: elements of the tensors of the probes stream and update; the tensors must be larger than the caches.
        turns: number of times that each model's layers are timed in the first format.
        widest: models with a larger hidden size are not timed.
        by_cpu_time: measure this process's CPU time, which is accurate for a single thread even on a busy machine.
        ranks_per_core: if above 1, ranks take turns on a core, and their CPU time is multiplied by it.
        by_wall: measure wall-clock time, for devices that continue while this thread waits for a core.
    """

    window_s: float = 0.06
    windows: int = 3
    largest_side: int = SIDES[-1]
    numbers: int = 2**21
    turns: int = 3
    widest: int = 4096
    by_cpu_time: bool = False
    ranks_per_core: float = 1.0
    by_wall: bool = False

    def shared_by(self, ranks: int, threads: int) -> TimingBudget:
        """Return the limits for ``ranks`` ranks that measure at the same time on the cores of this machine."""
        return replace(self, ranks_per_core=max(1.0, ranks * threads / len(os.sched_getaffinity(0))))

    def now(self) -> float:
        """Return the seconds since an arbitrary origin; waits for a core do not count, except with ``by_wall``."""
        if self.by_wall:
            return time.perf_counter()
        if self.by_cpu_time or self.ranks_per_core > 1:
            return self.ranks_per_core * time.process_time()
        return own_core_s()


@dataclass(frozen=True)
class Rates:
    """Measurements of one rank in FLOP/s, bytes/s and seconds; ``products``: dtype -> ((side, FLOP/s), ...)."""

    products: dict[str, tuple[tuple[float, float], ...]]
    stream: float
    update: float
    overhead_s: float
    copy: float


def rates_of(rank: Rank, dtypes: tuple[str, ...], pace: TimingBudget, reference: Reference) -> Rates:
    """Return this rank's rates, measured together with all other ranks and scaled to ``reference``. Collective.

    Args:
        dtypes: number formats of the matmuls; the first one is also used for the stream.
    """
    products = {}
    for dtype in dtypes:
        rank.report(f"matrix products in {dtype}")
        products[dtype] = _products(rank, dtype, pace, reference)
    rank.report("memory and optimizer")

    def rate(turn: Callable[[], object]) -> float:
        return _turns_per_s(rank, turn, pace, reference)

    stream = STREAM_PASSES * _bytes(dtypes[0], pace) * rate(_stream(rank, dtypes[0], pace))
    update = UPDATE_BYTES * pace.numbers * rate(_update(rank.place, pace))
    overhead_s = 1 / (2 * CHAIN * rate(_chain(rank.place)))
    copy = 2 * 4 * pace.numbers * rate(_copy(rank, pace))
    return Rates(products, stream, update, overhead_s, copy)


def update_rate_of_host(pace: TimingBudget) -> float:
    """Return the bytes/s of an optimizer update in the host's memory, without the other ranks. Not collective."""
    single_rank = Rank(0, 1, "cpu", "", torch.get_num_threads())
    turn = _update(torch.device("cpu"), pace)
    return UPDATE_BYTES * pace.numbers * _turns_per_s(single_rank, turn, pace, Reference(single_rank, pace.now))


def _products(rank: Rank, dtype: str, pace: TimingBudget, reference: Reference) -> tuple[tuple[float, float], ...]:
    table = []
    for side in SIDES:
        if side > pace.largest_side:
            break
        turns = _turns_per_s(rank, _product(rank.place, dtype, side), pace, reference)
        table.append((float(side), 6.0 * side**3 * turns))
        if side >= LEAST_SIDE and rank.most(1 / turns) > LONGEST_TURN_S / 8:  # the next side takes 8 times as long
            break
    return tuple(table)


def _product(place: torch.device, dtype: str, side: int) -> Callable[[], object]:
    x, weight, dy = (torch.randn(side, side, device=place).to(device.DTYPES[dtype]) for _ in range(3))
    y, dx, dw = (torch.empty_like(x) for _ in range(3))

    def turn() -> None:
        torch.mm(x, weight.t(), out=y)
        torch.mm(dy, weight, out=dx)
        torch.mm(dy.t(), x, out=dw)

    return turn


def _stream(rank: Rank, dtype: str, pace: TimingBudget) -> Callable[[], object]:
    shape = pace.numbers // STREAM_WIDTH, STREAM_WIDTH
    x, y, gradient = (torch.randn(shape, device=rank.place).to(device.DTYPES[dtype]) for _ in range(3))
    x.requires_grad_()
    x.grad = torch.zeros_like(x)

    def turn() -> None:
        F.gelu(F.layer_norm(x + y, (STREAM_WIDTH,)), approximate="tanh").backward(gradient)

    return turn


def _update(place: torch.device, pace: TimingBudget) -> Callable[[], object]:
    weight = torch.zeros(pace.numbers, device=place, requires_grad=True)
    weight.grad = torch.ones_like(weight)
    optimizer, gradient = torch.optim.AdamW([weight], lr=1e-3, fused=True), weight.grad

    def turn() -> None:
        torch.linalg.vector_norm(gradient)
        optimizer.step()

    return turn


def _chain(place: torch.device) -> Callable[[], object]:
    start = torch.zeros(16, device=place, requires_grad=True)
    ones = torch.ones(16, device=place)

    def turn() -> None:
        x = start
        for _ in range(CHAIN):
            x = x + ones
        start.grad = None
        x.backward(ones)

    return turn


def _copy(rank: Rank, pace: TimingBudget) -> Callable[[], object]:
    host = device.host_memory((pace.numbers,), torch.float32, rank.place)
    on_device = torch.empty(pace.numbers, device=rank.place)

    def turn() -> None:
        on_device.copy_(host, non_blocking=True)
        host.copy_(on_device, non_blocking=True)

    return turn


def _bytes(dtype: str, pace: TimingBudget) -> int:
    return pace.numbers * device.DTYPES[dtype].itemsize


def _turns_per_s(rank: Rank, turn: Callable[[], object], pace: TimingBudget, reference: Reference) -> float:
    """Return the median number of turns per second over all windows, scaled to ``reference``. Collective.

    All ranks start each window together.
    """
    turn()
    device.synchronize(rank.kind)
    rank.meet()
    batch = max(1, int(pace.window_s / 4 / _seconds(rank, turn, 1, pace)))
    rates = []
    reference.read()
    for _ in range(pace.windows):
        rank.meet()
        num_done, spent = 0, 0.0
        while spent < pace.window_s:
            spent += _seconds(rank, turn, batch, pace)
            num_done += batch
        rates.append(num_done / (spent * reference.scale()))
    return statistics.median(rates)


def _seconds(rank: Rank, turn: Callable[[], object], times: int, pace: TimingBudget) -> float:
    start = pace.now()
    for _ in range(times):
        turn()
    device.synchronize(rank.kind)
    return max(pace.now() - start, 1e-9)


# Latency and bandwidth between ranks of this machine, by type of communication.
#
# Each message size is timed with all ranks, which compute between the messages on CPUs. The two parameters of a
# ``Wire`` are fitted to all sizes by minimizing the relative errors. A rank of n sends 2 (n - 1) / n of the bytes of an
# all-reduce, (n - 1) / n of the result of an all-gather or the input of a reduce-scatter, and all bytes of a send. A
# collective of n ranks has log2(n) times the latency.

SIZES = (2**8, 2**14, 2**18, 2**21, 2**24)
"""Sizes of the messages in bytes."""
ROUND_S, ROUNDS = 0.05, 3
SHORTEST_S = 1e-6
"""Lower bound of a message's time, in case the message takes no measurable time in addition to the work."""
Sample = tuple[float, float]
"""(bytes sent by a rank, seconds)."""


def link_alone(rank: Rank, sizes: Sequence[int], round_s: float) -> Link:
    """Return the link between all ranks, scaled to the median speed of this measurement. Collective."""
    reference = Reference(rank, TimingBudget().now)
    link = link_of(rank, reference, sizes, round_s)
    return link.slowed(reference.usual_s / reference.unit_s)


def link_of(rank: Rank, reference: Reference, sizes: Sequence[int] = SIZES, round_s: float = ROUND_S) -> Link:
    """Return the link between all ranks, scaled to the speed of ``reference``; the same on every rank.

    Collective over at least two ranks.
    """
    wires = {}
    for name, message_type in KINDS.items():
        rank.report(f"messages: {name}")
        turns = [(size, message_type.make(rank, size)) for size in sizes]
        samples = [
            (message_type.share(rank.size) * size, _message_seconds(rank, turn, round_s, reference) / message_type.legs)
            for size, turn in turns
        ]
        wires[name] = fitted(samples, message_type.latencies(rank.size))
    return Link(**wires)


def fitted(samples: Sequence[Sample], latencies: float) -> Wire:
    """Fit ``latencies * latency_s + bytes / bandwidth`` to the samples.

    The sum of squared relative errors is minimized. If the fitted latency or bandwidth is not positive, the latency of
    the shortest message or the bandwidth of the fastest message is used instead.

    Raises:
        ValueError: the samples have fewer than two sizes.
    """
    if len({sent for sent, _ in samples}) < 2:
        raise ValueError(f"the fit of a line needs messages of at least two sizes, got {samples}")
    weights = [1 / seconds**2 for _, seconds in samples]
    total = sum(weights)
    mean_x = sum(w * x for w, (x, _) in zip(weights, samples, strict=True)) / total
    mean_y = sum(w * y for w, (_, y) in zip(weights, samples, strict=True)) / total
    covariance = sum(w * (x - mean_x) * (y - mean_y) for w, (x, y) in zip(weights, samples, strict=True))
    slope = covariance / sum(w * (x - mean_x) ** 2 for w, (x, _) in zip(weights, samples, strict=True))
    start = mean_y - slope * mean_x
    if slope <= 0:
        slope = min(seconds / sent for sent, seconds in samples)
    if start <= 0:
        start = min(seconds for _, seconds in samples)
    return Wire(latency_s=start / latencies, bandwidth=1 / slope)


def _all_reduce(rank: Rank, size: int) -> Callable[[], object]:
    data = torch.zeros(size // 4, device=rank.place)
    return lambda: dist.all_reduce(data)


def _gather(rank: Rank, size: int) -> Callable[[], object]:
    local = torch.zeros(max(1, size // 4 // rank.size), device=rank.place)
    gathered = torch.zeros(len(local) * rank.size, device=rank.place)
    return lambda: all_gather_single(gathered, local)


def _scatter(rank: Rank, size: int) -> Callable[[], object]:
    full = torch.zeros(rank.size * max(1, size // 4 // rank.size), device=rank.place)
    local = torch.zeros(len(full) // rank.size, device=rank.place)
    return lambda: reduce_scatter_single(local, full)


def _send(rank: Rank, size: int) -> Callable[[], object]:
    """Return a function that exchanges messages with a neighbour; with an odd number of ranks, the last one is idle."""
    data = torch.zeros(size // 4, device=rank.place)
    peer = rank.number ^ 1
    if peer >= rank.size:
        return lambda: None
    first, second = (dist.send, dist.recv) if rank.number < peer else (dist.recv, dist.send)

    def turn() -> None:
        first(data, peer)
        second(data, peer)

    return turn


def _message_seconds(rank: Rank, turn: Callable[[], object], round_s: float, reference: Reference) -> float:
    """Return the seconds of a message: the median over the rounds, on the slowest rank. Collective."""
    work = _work(rank)

    def both() -> None:
        work()
        turn()

    turn_s = rank.most(_spent(rank, both, 2, reference) / 2)
    times = max(1, min(1000, int(round_s / turn_s)))
    reference.read()
    seconds = [
        (_spent(rank, both, times, reference) - _spent(rank, work, times, reference)) / times for _ in range(ROUNDS)
    ]
    return max(rank.most(statistics.median(seconds)) * reference.scale(), SHORTEST_S)


def _work(rank: Rank) -> Callable[[], object]:
    """Return a function to call before each message: on a CPU, a matmul of about a millisecond.

    In training, ranks compute between messages. If ranks only communicate, they do not sleep and their data stay in the
    caches, which halves the time of a message. On other devices the function does nothing, since messages are only
    queued.
    """
    if rank.kind != "cpu":
        return lambda: None
    left, right = torch.ones(512, 256), torch.ones(256, 512)
    return lambda: torch.mm(left, right)


def _spent(rank: Rank, turn: Callable[[], object], times: int, reference: Reference) -> float:
    """Return the wall-clock seconds of ``times`` turns, minus the time lost to other programs. Collective."""
    rank.meet()
    waited, start = waits(), time.perf_counter()
    for _ in range(times):
        turn()
    device.synchronize(rank.kind)
    seconds = time.perf_counter() - start
    return max(seconds - reference.lost_s(waited, seconds), 1e-9)


class Kind(NamedTuple):
    """A type of communication.

    Args:
        make: (rank, bytes) -> function that sends a message of this size.
        share: n -> share of the bytes that each of n ranks sends.
        latencies: n -> latency of a message between n ranks, in multiples of ``Wire.latency_s``.
        legs: number of consecutive messages per call.
    """

    make: Callable[[Rank, int], Callable[[], object]]
    share: Callable[[int], float]
    latencies: Callable[[int], float]
    legs: int = 1


KINDS = {
    "all_reduce": Kind(_all_reduce, lambda n: 2 * (n - 1) / n, math.log2),
    "gather": Kind(_gather, lambda n: (n - 1) / n, math.log2),
    "scatter": Kind(_scatter, lambda n: (n - 1) / n, math.log2),
    "send": Kind(_send, lambda n: 1.0, lambda n: 1.0, legs=2),
}
"""Type of communication -> its measurement; the keys are the fields of ``Link``."""
