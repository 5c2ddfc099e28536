"""How fast ranks of this machine tell each other something, by kind of message, as latency and bandwidth.

Each size is timed while all ranks take part, on CPUs between pieces of work; the two numbers of a ``Wire`` are fitted
to all sizes so that the relative errors are least. A rank of n sends 2 (n - 1) / n of the bytes of an all-reduce,
(n - 1) / n of what an all-gather gives or a reduce-scatter takes, and all of what it sends to one other; a collective
of n ranks has the latency log2(n) times.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from megatron import device
from megatron.planner.machine import Link, Wire
from megatron.planner.ranks import Rank
from megatron.torch_compat import all_gather_single, reduce_scatter_single

SIZES = (2**8, 2**14, 2**18, 2**21, 2**24)
"""Bytes of the messages."""
ROUND_S, ROUNDS = 0.05, 3
SHORTEST_S = 1e-6
"""Of a message, where it cannot be told from the work ahead of it."""
Sample = tuple[float, float]
"""(bytes that a rank sends, seconds)."""


def link_of(rank: Rank, sizes: Sequence[int] = SIZES, round_s: float = ROUND_S) -> Link:
    """Return the link between all ranks, the same numbers on each. Collective over two ranks and more."""
    wires = {}
    for name, kind in KINDS.items():
        rank.tell(f"messages: {name}")
        turns = [(size, kind.make(rank, size)) for size in sizes]
        samples = [
            (kind.share(rank.size) * size, _message_seconds(rank, turn, round_s) / kind.legs) for size, turn in turns
        ]
        wires[name] = fitted(samples, kind.latencies(rank.size))
    return Link(**wires)


def fitted(samples: Sequence[Sample], latencies: float) -> Wire:
    """Return the wire for which ``latencies * latency_s + bytes / bandwidth`` is nearest to the samples.

    The sum of squares of the relative errors is least. Where the samples show no latency or no bandwidth (a line that
    falls), the shortest message stands for the one, the fastest for the other.

    Raises:
        ValueError: less than two sizes.
    """
    if len({sent for sent, _ in samples}) < 2:
        raise ValueError(f"a line needs messages of two sizes at least, got {samples}")
    weights = [1 / seconds**2 for _, seconds in samples]
    total = sum(weights)
    mean_x = sum(w * x for w, (x, _) in zip(weights, samples, strict=True)) / total
    mean_y = sum(w * y for w, (_, y) in zip(weights, samples, strict=True)) / total
    over = sum(w * (x - mean_x) * (y - mean_y) for w, (x, y) in zip(weights, samples, strict=True))
    slope = over / sum(w * (x - mean_x) ** 2 for w, (x, _) in zip(weights, samples, strict=True))
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
    part = torch.zeros(max(1, size // 4 // rank.size), device=rank.place)
    whole = torch.zeros(len(part) * rank.size, device=rank.place)
    return lambda: all_gather_single(whole, part)


def _scatter(rank: Rank, size: int) -> Callable[[], object]:
    whole = torch.zeros(rank.size * max(1, size // 4 // rank.size), device=rank.place)
    part = torch.zeros(len(whole) // rank.size, device=rank.place)
    return lambda: reduce_scatter_single(part, whole)


def _send(rank: Rank, size: int) -> Callable[[], object]:
    """Return a message there and one back, of neighbours; with an odd number of ranks the last one looks on."""
    data = torch.zeros(size // 4, device=rank.place)
    peer = rank.number ^ 1
    if peer >= rank.size:
        return lambda: None
    first, second = (dist.send, dist.recv) if rank.number < peer else (dist.recv, dist.send)

    def turn() -> None:
        first(data, peer)
        second(data, peer)

    return turn


def _message_seconds(rank: Rank, turn: Callable[[], object], round_s: float) -> float:
    """Return the median seconds of a message over the rounds, as the slowest rank has it. Collective."""
    work = _work(rank)

    def both() -> None:
        work()
        turn()

    one = _agreed(rank, _spent(rank, both, 2) / 2)
    times = max(1, min(1000, int(round_s / one)))
    seconds = [(_spent(rank, both, times) - _spent(rank, work, times)) / times for _ in range(ROUNDS)]
    return max(_agreed(rank, statistics.median(seconds)), SHORTEST_S)


def _work(rank: Rank) -> Callable[[], object]:
    """Return what ranks do ahead of a message: on a CPU a product of about a millisecond, as between two of a training.

    Ranks that wait for one another all the time find each other awake and their numbers in the caches: messages then
    take half as long. Other devices only queue their messages.
    """
    if rank.kind != "cpu":
        return lambda: None
    left, right = torch.ones(512, 256), torch.ones(256, 512)
    return lambda: torch.mm(left, right)


def _spent(rank: Rank, turn: Callable[[], object], times: int) -> float:
    rank.meet()
    start = time.perf_counter()
    for _ in range(times):
        turn()
    device.synchronize(rank.kind)
    return max(time.perf_counter() - start, 1e-9)


def _agreed(rank: Rank, seconds: float) -> float:
    """Return the most of all ranks, so that all repeat alike."""
    value = torch.tensor([seconds], dtype=torch.float64, device=rank.place)
    dist.all_reduce(value, op=dist.ReduceOp.MAX)
    return value.item()


class Kind(NamedTuple):
    """A kind of message: what makes a turn of so many bytes, and what n ranks pay for one.

    Args:
        share: of the bytes that a rank of n sends.
        latencies: that one message of n ranks has.
        legs: messages in a turn, one after the other.
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
"""The wires of a ``Link``, by name."""
