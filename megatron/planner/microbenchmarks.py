"""Measure matmuls, memory bandwidth and links of one device while the other ranks do the same."""

from __future__ import annotations

import functools
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
from megatron.mpu.fp8 import COLUMNS, ROWS, has_fp8_products, quantized_factors, scaled_product
from megatron.mpu.groups import SINGLE
from megatron.planner.machine import Link, Wire
from megatron.planner.reference import Reference, core_time_s, queue_times
from megatron.planner.spawn_ranks import Rank
from megatron.torch_compat import all_gather_single, reduce_scatter_single

# Rates of one device, measured while the other ranks do the same: matmuls, memory passes, updates, launches.
#
# | probe | one iteration | counted |
# |---|---|---|
# | products | y = x Wᵀ, dx = dy W, dW = dyᵀ x, all square: the three matmuls of a linear layer | 6 side³ FLOPs |
# | products in FP8 | y and dx of quantized factors with scales per row, without the quantization | 4 side³ FLOPs |
# | stream | a sum, a norm and a GELU of activations, forward and backward | ``STREAM_PASSES`` times a tensor's bytes |
# | update | the norm of the gradients and torch's fused AdamW, in fp32 | 32 bytes per parameter: 5 read, 3 written |
# | overhead | a chain of small sums, forward and backward | two launches of a sum |
# | copy | from host memory to the device, and back | twice the bytes of the tensor |
#
# Iterations are repeated for a time window. The result is the median rate of several windows. Warm-up iterations before
# the first window exclude one-time costs (first touch of memory, selection of kernels).

SIDES = (64, 128, 256, 512, 1024, 2048, 4096, 8192)
MAX_RUN_S = 0.25
"""Maximum seconds of a matmul iteration; larger sides that would take longer are skipped, except ``MIN_SIDE``."""
MIN_SIDE = 512
STREAM_PASSES = (3 + 2 + 2) + (3 + 3 + 3)
"""Tensors read and written: by sum, norm, GELU; by the backward of GELU and norm, and the sum of two gradients."""
STREAM_WIDTH = 512
UPDATE_BYTES = 32
CHAIN = 200


@dataclass(frozen=True)
class TimingBudget:
    """Measurement limits: each rate is measured in ``windows`` time windows of ``window_s`` seconds.

    Args:
        max_side: matmuls with a larger side are not timed.
        num_elements: tensor elements in the stream and update probes; the tensors must be larger than the caches.
        num_repetitions: repetitions per model in the default dtype.
        max_hidden_size: models with a larger hidden size are not timed.
        use_cpu_time: measure this process's CPU time, which is accurate for a single thread even on a busy machine.
        ranks_per_core: if above 1, ranks take turns on a core, and their CPU time is multiplied by it.
        use_wall_clock: measure wall-clock time, for devices that continue while this thread waits for a core.
    """

    window_s: float = 0.06
    windows: int = 3
    max_side: int = SIDES[-1]
    num_elements: int = 2**21
    num_repetitions: int = 3
    max_hidden_size: int = 4096
    use_cpu_time: bool = False
    ranks_per_core: float = 1.0
    use_wall_clock: bool = False

    def shared_by(self, ranks: int, threads: int) -> TimingBudget:
        """Return limits for ``ranks`` ranks that measure at the same time on this machine's cores."""
        return replace(self, ranks_per_core=max(1.0, ranks * threads / len(os.sched_getaffinity(0))))

    def now(self) -> float:
        """Return seconds since an arbitrary origin.

        The time that this process waits for a core is included only with ``use_wall_clock``.
        """
        if self.use_wall_clock:
            return time.perf_counter()
        if self.use_cpu_time or self.ranks_per_core > 1:
            return self.ranks_per_core * time.process_time()
        return core_time_s()


@dataclass(frozen=True)
class Rates:
    """One rank's measurements in FLOP/s, bytes/s and seconds; ``products``: dtype or "fp8" -> ((side, FLOP/s), ...)."""

    products: dict[str, tuple[tuple[float, float], ...]]
    stream: float
    update: float
    overhead_s: float
    copy: float


def measure_rates(rank: Rank, dtypes: tuple[str, ...], timing_budget: TimingBudget, reference: Reference) -> Rates:
    """Measure this rank's rates together with all other ranks, scaled to ``reference``. Collective.

    Args:
        dtypes: matmul dtypes; the first one is also used for the stream.
    """
    products = {}
    for dtype in dtypes:
        rank.report(f"matrix products in {dtype}")
        make = functools.partial(_product, rank.device, dtype)
        products[dtype] = _products(rank, make, 6.0, timing_budget, reference)
    if has_fp8_products(rank.device_type):
        rank.report("matrix products in FP8")
        make = functools.partial(_fp8_product, rank.device)
        products["fp8"] = _products(rank, make, 4.0, timing_budget, reference)
    rank.report("memory and optimizer")

    def rate(run_once: Callable[[], object]) -> float:
        return _runs_per_s(rank, run_once, timing_budget, reference)

    stream = STREAM_PASSES * _bytes(dtypes[0], timing_budget) * rate(_stream(rank, dtypes[0], timing_budget))
    update = UPDATE_BYTES * timing_budget.num_elements * rate(_update(rank.device, timing_budget))
    overhead_s = 1 / (2 * CHAIN * rate(_chain(rank.device)))
    copy = 2 * 4 * timing_budget.num_elements * rate(_copy(rank, timing_budget))
    return Rates(products, stream, update, overhead_s, copy)


def measure_host_update_rate(timing_budget: TimingBudget) -> float:
    """Measure the bytes/s of an optimizer update in host memory, without the other ranks. Not collective."""
    single_rank = Rank(0, 1, "cpu", "", torch.get_num_threads())
    run_once = _update(torch.device("cpu"), timing_budget)
    return (
        UPDATE_BYTES
        * timing_budget.num_elements
        * _runs_per_s(single_rank, run_once, timing_budget, Reference(single_rank, timing_budget.now))
    )


def _products(
    rank: Rank,
    make: Callable[[int], Callable[[], object]],
    num_flops: float,
    timing_budget: TimingBudget,
    reference: Reference,
) -> tuple[tuple[float, float], ...]:
    """Measure ((side, FLOP/s), ...). Collective.

    Args:
        make: returns an iteration for a side.
        num_flops: FLOPs of an iteration, in units of side³.
    """
    table = []
    for side in SIDES:
        if side > timing_budget.max_side:
            break
        runs_per_s = _runs_per_s(rank, make(side), timing_budget, reference)
        table.append((float(side), num_flops * side**3 * runs_per_s))
        if (
            side >= MIN_SIDE and rank.max_over_ranks(1 / runs_per_s) > MAX_RUN_S / 8
        ):  # the next side takes 8 times as long
            break
    return tuple(table)


def _product(target_device: torch.device, dtype: str, side: int) -> Callable[[], object]:
    x, weight, dy = (torch.randn(side, side, device=target_device).to(device.DTYPES[dtype]) for _ in range(3))
    y, dx, dw = (torch.empty_like(x) for _ in range(3))

    def run_once() -> None:
        torch.mm(x, weight.t(), out=y)
        torch.mm(dy, weight, out=dx)
        torch.mm(dy.t(), x, out=dw)

    return run_once


def _fp8_product(target_device: torch.device, side: int) -> Callable[[], object]:
    x, weight, dy = (torch.randn(side, side, device=target_device, dtype=torch.bfloat16) for _ in range(3))
    y, dx = (torch.empty_like(x) for _ in range(2))
    forward = quantized_factors(x, weight, ROWS, SINGLE)
    backward = quantized_factors(dy, weight, COLUMNS, SINGLE)

    def run_once() -> None:
        for (a, b), out in ((forward, y), (backward, dx)):
            scaled_product(a.values, b.values, a.scales, b.scales, out)

    return run_once


def _stream(rank: Rank, dtype: str, timing_budget: TimingBudget) -> Callable[[], object]:
    shape = timing_budget.num_elements // STREAM_WIDTH, STREAM_WIDTH
    x, y, gradient = (torch.randn(shape, device=rank.device).to(device.DTYPES[dtype]) for _ in range(3))
    x.requires_grad_()
    x.grad = torch.zeros_like(x)

    def run_once() -> None:
        F.gelu(F.layer_norm(x + y, (STREAM_WIDTH,)), approximate="tanh").backward(gradient)

    return run_once


def _update(target_device: torch.device, timing_budget: TimingBudget) -> Callable[[], object]:
    weight = torch.zeros(timing_budget.num_elements, device=target_device, requires_grad=True)
    weight.grad = torch.ones_like(weight)
    optimizer, gradient = torch.optim.AdamW([weight], lr=1e-3, fused=True), weight.grad

    def run_once() -> None:
        torch.linalg.vector_norm(gradient)
        optimizer.step()

    return run_once


def _chain(target_device: torch.device) -> Callable[[], object]:
    start = torch.zeros(16, device=target_device, requires_grad=True)
    ones = torch.ones(16, device=target_device)

    def run_once() -> None:
        x = start
        for _ in range(CHAIN):
            x = x + ones
        start.grad = None
        x.backward(ones)

    return run_once


def _copy(rank: Rank, timing_budget: TimingBudget) -> Callable[[], object]:
    host = device.host_memory((timing_budget.num_elements,), torch.float32, rank.device)
    on_device = torch.empty(timing_budget.num_elements, device=rank.device)

    def run_once() -> None:
        on_device.copy_(host, non_blocking=True)
        host.copy_(on_device, non_blocking=True)

    return run_once


def _bytes(dtype: str, timing_budget: TimingBudget) -> int:
    return timing_budget.num_elements * device.DTYPES[dtype].itemsize


def _runs_per_s(rank: Rank, run_once: Callable[[], object], timing_budget: TimingBudget, reference: Reference) -> float:
    """Return the median iterations per second over all windows, scaled to ``reference``. Collective.

    All ranks start each window together.
    """
    run_once()
    device.synchronize(rank.device_type)
    rank.barrier()
    batch = max(1, int(timing_budget.window_s / 4 / _seconds(rank, run_once, 1, timing_budget)))
    rates = []
    reference.read()
    for _ in range(timing_budget.windows):
        rank.barrier()
        num_done, spent = 0, 0.0
        while spent < timing_budget.window_s:
            spent += _seconds(rank, run_once, batch, timing_budget)
            num_done += batch
        rates.append(num_done / (spent * reference.scale()))
    return statistics.median(rates)


def _seconds(rank: Rank, run_once: Callable[[], object], times: int, timing_budget: TimingBudget) -> float:
    start = timing_budget.now()
    for _ in range(times):
        run_once()
    device.synchronize(rank.device_type)
    return max(timing_budget.now() - start, 1e-9)


# Latency and bandwidth between ranks of this machine, by type of communication.
#
# Each message size is timed with all ranks, which compute between the messages on CPUs. The two parameters of a
# ``Wire`` are fitted to all sizes by minimizing the relative errors. A rank of n sends 2 (n - 1) / n of the bytes of an
# all-reduce, (n - 1) / n of the result of an all-gather or the input of a reduce-scatter, and all bytes of a send. A
# collective of n ranks has log2(n) times the latency.

MESSAGE_BYTES = (2**8, 2**14, 2**18, 2**21, 2**24)
"""Sizes of the messages in bytes."""
ROUND_S, ROUNDS = 0.05, 3
MIN_MESSAGE_S = 1e-6
"""Lower bound of a message's time, in case the message takes no measurable time in addition to the work."""
Sample = tuple[float, float]
"""(bytes sent by a rank, seconds)."""


def measure_scaled_link(rank: Rank, message_bytes: Sequence[int], round_s: float) -> Link:
    """Measure the link between all ranks, scaled to this measurement's median speed. Collective."""
    reference = Reference(rank, TimingBudget().now)
    link = measure_link(rank, reference, message_bytes, round_s)
    return link.slowed(reference.median_s / reference.first_s)


def measure_link(
    rank: Rank, reference: Reference, message_bytes: Sequence[int] = MESSAGE_BYTES, round_s: float = ROUND_S
) -> Link:
    """Measure the link between all ranks, scaled to the speed of ``reference``; the same on every rank.

    Collective over at least two ranks.
    """
    wires = {}
    for name, message_type in COLLECTIVES.items():
        rank.report(f"messages: {name}")
        messages = [(size, message_type.make(rank, size)) for size in message_bytes]
        samples = [
            (
                message_type.share(rank.size) * size,
                _message_seconds(rank, run_once, round_s, reference) / message_type.messages_per_call,
            )
            for size, run_once in messages
        ]
        wires[name] = fit_wire(samples, message_type.latencies(rank.size))
    return Link(**wires)


def fit_wire(samples: Sequence[Sample], latencies: float) -> Wire:
    """Fit ``latencies * latency_s + bytes / bandwidth`` to the samples.

    The sum of squared relative errors is minimized. If the fitted latency or bandwidth is not positive, the shortest
    message's latency or the fastest message's bandwidth is used instead.

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
    data = torch.zeros(size // 4, device=rank.device)
    return lambda: dist.all_reduce(data)


def _gather(rank: Rank, size: int) -> Callable[[], object]:
    local = torch.zeros(max(1, size // 4 // rank.size), device=rank.device)
    gathered = torch.zeros(len(local) * rank.size, device=rank.device)
    return lambda: all_gather_single(gathered, local)


def _scatter(rank: Rank, size: int) -> Callable[[], object]:
    full = torch.zeros(rank.size * max(1, size // 4 // rank.size), device=rank.device)
    local = torch.zeros(len(full) // rank.size, device=rank.device)
    return lambda: reduce_scatter_single(local, full)


def _send(rank: Rank, size: int) -> Callable[[], object]:
    """Return a function that exchanges messages with a neighbour; the last of an odd number of ranks is idle."""
    data = torch.zeros(size // 4, device=rank.device)
    peer = rank.idx ^ 1
    if peer >= rank.size:
        return lambda: None
    first, second = (dist.send, dist.recv) if rank.idx < peer else (dist.recv, dist.send)

    def run_once() -> None:
        first(data, peer)
        second(data, peer)

    return run_once


def _message_seconds(rank: Rank, run_once: Callable[[], object], round_s: float, reference: Reference) -> float:
    """Return the seconds per message: the median over rounds, on the slowest rank. Collective."""
    work = _filler_work(rank)

    def work_and_message() -> None:
        work()
        run_once()

    pair_s = rank.max_over_ranks(_wall_seconds(rank, work_and_message, 2, reference) / 2)
    times = max(1, min(1000, int(round_s / pair_s)))
    reference.read()
    seconds = [
        (_wall_seconds(rank, work_and_message, times, reference) - _wall_seconds(rank, work, times, reference)) / times
        for _ in range(ROUNDS)
    ]
    return max(rank.max_over_ranks(statistics.median(seconds)) * reference.scale(), MIN_MESSAGE_S)


def _filler_work(rank: Rank) -> Callable[[], object]:
    """Return a function to call before each message: on a CPU, a matmul that takes about a millisecond.

    In training, ranks compute between messages. If ranks only communicate, they do not sleep and their data stay in the
    caches, which halves the message time. On other devices the function does nothing, since messages are only queued.
    """
    if rank.device_type != "cpu":
        return lambda: None
    left, right = torch.ones(512, 256), torch.ones(256, 512)
    return lambda: torch.mm(left, right)


def _wall_seconds(rank: Rank, run_once: Callable[[], object], times: int, reference: Reference) -> float:
    """Time ``times`` iterations in wall-clock seconds, minus the time lost to other programs. Collective."""
    rank.barrier()
    waited, start = queue_times(), time.perf_counter()
    for _ in range(times):
        run_once()
    device.synchronize(rank.device_type)
    seconds = time.perf_counter() - start
    return max(seconds - reference.lost_s(waited, seconds), 1e-9)


class Collective(NamedTuple):
    """A communication type.

    Args:
        make: (rank, bytes) -> function that sends a message of this size.
        share: n -> share of the bytes that each rank out of n sends.
        latencies: n -> message latency between n ranks, in multiples of ``Wire.latency_s``.
        messages_per_call: consecutive messages per call.
    """

    make: Callable[[Rank, int], Callable[[], object]]
    share: Callable[[int], float]
    latencies: Callable[[int], float]
    messages_per_call: int = 1


COLLECTIVES = {
    "all_reduce": Collective(_all_reduce, lambda n: 2 * (n - 1) / n, math.log2),
    "gather": Collective(_gather, lambda n: (n - 1) / n, math.log2),
    "scatter": Collective(_scatter, lambda n: (n - 1) / n, math.log2),
    "send": Collective(_send, lambda n: 1.0, lambda n: 1.0, messages_per_call=2),
}
"""Type of communication -> its measurement; the keys are the fields of ``Link``."""
