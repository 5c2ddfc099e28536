"""Cutting layers into stages and chunks: balanced, equal layers in chunks, unequal layers in chunks, measured
times. No torch.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from math import inf
from operator import add
from typing import Literal

from tds.schedule.actions import LOOP, Placement

Bounds = list[int]

# The one dynamic program: the cheapest of all cuts into runs.


def _cheapest_cut(
    size: int,
    num_parts: int,
    price: Callable[[int, int], float],
    join: Callable[[float, float], float],
    shortest: Literal["first", "last"] = "first",
) -> tuple[float, Bounds]:
    """Return (the least joined price, its bounds) over the cuts of ``size`` items into non-empty runs.

    Args:
        price: of the items from start to stop; infinite: they may not be one run.
        join: ``max`` or ``add``.
        shortest: of equal cuts the one whose first run is shortest, then its second, ...; or the last, then the one
            before it, ...
    """
    is_mirrored = shortest == "last"
    prices = [
        [price(size - stop, size - start) if is_mirrored else price(start, stop) for stop in range(start + 1, size + 1)]
        for start in range(size)
    ]
    rests = [[inf] * size + [0.0]]  # rests[k][i]: the least joined price when items i ... are cut into k runs
    for _ in range(num_parts):
        rests.append([*[min(map(join, prices[i], rests[-1][i + 1 :])) for i in range(size)], inf])
    bounds = [0]
    for rest in reversed(rests[:-1]):
        start = bounds[-1]
        joined = list(map(join, prices[start], rest[start + 1 :]))
        bounds.append(start + 1 + joined.index(min(joined)))
    return rests[-1][0], [size - bound for bound in reversed(bounds)] if is_mirrored else bounds


def _sums(weights: Sequence[float]) -> Callable[[int, int], float]:
    """Return what gives the sum of the weights from start to stop."""
    upto = [0.0, *itertools.accumulate(weights)]
    return lambda start, stop: upto[stop] - upto[start]


# Cutting layers into stages by their measured times.

TOLERANCE = 0.01
"""Times within this share of the best count as equal: a measurement is no better."""
TRIED_ONE_BY_ONE = 20_000


def partition_by_times(
    times: Sequence[float], parameters: Sequence[int], num_stages: int, num_chunks: int = 1, placement: str = LOOP
) -> Bounds:
    """Return bounds by which the slowest stage takes as little time as can be; among equals, with even parameters.

    Exact for one chunk, and for several where the ways to cut are few; else the best that moving bounds finds.

    Raises:
        ValueError: fewer layers than pieces.
    """
    num_pieces = num_stages * num_chunks
    if len(times) < num_pieces:
        raise ValueError(
            f"each stage must hold a layer in each chunk, got {len(times)} layers for {num_stages} stages x "
            f"{num_chunks} chunks. Use fewer stages or chunks."
        )
    if num_chunks == 1:
        return _cut_in_runs(times, parameters, num_pieces)
    score = _scorer(times, parameters, num_stages, placement)
    if math.comb(len(times) - 1, num_pieces - 1) <= TRIED_ONE_BY_ONE:
        return _best(_every_cut(len(times), num_pieces), score)
    start = _cut_in_runs(times, parameters, num_pieces)
    return _improved(start, score)


def _cut_in_runs(times: Sequence[float], parameters: Sequence[int], num_pieces: int) -> Bounds:
    time_of, parameters_of = _sums(times), _sums(parameters)
    slowest, _ = _cheapest_cut(len(times), num_pieces, time_of, max)
    limit = slowest * (1 + TOLERANCE)

    def price(start: int, stop: int) -> float:
        return parameters_of(start, stop) if time_of(start, stop) <= limit else inf

    return _cheapest_cut(len(times), num_pieces, price, max, "last")[1]


def _scorer(
    times: Sequence[float], parameters: Sequence[int], num_stages: int, placement: str
) -> Callable[[Bounds], tuple[float, float]]:
    def largest(weights: Sequence[float], bounds: Bounds) -> float:
        pieces = [sum(weights[start:stop]) for start, stop in itertools.pairwise(bounds)]
        return max(stage_sums(pieces, num_stages, placement))

    return lambda bounds: (largest(times, bounds), largest(parameters, bounds))


def _every_cut(num_layers: int, num_pieces: int) -> Iterator[Bounds]:
    for inner in itertools.combinations(range(1, num_layers), num_pieces - 1):
        yield [0, *inner, num_layers]


def _best(cuts: Iterator[Bounds], score: Callable[[Bounds], tuple[float, float]]) -> Bounds:
    scored = [(*score(bounds), bounds) for bounds in cuts]
    limit = min(time for time, _, _ in scored) * (1 + TOLERANCE)
    return min((weight, time, bounds) for time, weight, bounds in scored if time <= limit)[2]


def _improved(bounds: Bounds, score: Callable[[Bounds], tuple[float, float]]) -> Bounds:
    """Move one or two bounds by one layer as long as that helps."""
    now = score(bounds)
    while True:
        better = min(((score(each), each) for each in _neighbours(bounds)), default=(now, bounds))
        if better[0] >= now:
            return bounds
        now, bounds = better


def _neighbours(bounds: Bounds) -> Iterator[Bounds]:
    inner = range(1, len(bounds) - 1)
    moves = [(i, step) for i in inner for step in (-1, 1)]
    pairs = [pair for pair in itertools.combinations(moves, 2) if pair[0][0] != pair[1][0]]
    for moved in [(move,) for move in moves] + pairs:
        each = list(bounds)
        for index, step in moved:
            each[index] += step
        if all(start < stop for start, stop in itertools.pairwise(each)):
            yield each


def chunks_on(bounds: Sequence[int], num_stages: int, stage: int, placement: str = LOOP) -> list[tuple[int, int]]:
    """Return (first, one past the last) of each piece that lies on ``stage``, by chunk."""
    pieces = Placement(num_stages, (len(bounds) - 1) // num_stages, placement).own_pieces(stage)
    return [(bounds[piece], bounds[piece + 1]) for piece in pieces]


def stage_sums(pieces: Sequence[float], num_stages: int, placement: str = LOOP) -> list[float]:
    """Return what the pieces of each stage add up to."""
    lie = Placement(num_stages, len(pieces) // num_stages, placement)
    return [sum(pieces[piece] for piece in lie.own_pieces(stage)) for stage in range(num_stages)]


def partition_uniform_chunks(
    num_layers: int, num_stages: int, num_chunks: int, first: float, last: float, placement: str = LOOP
) -> list[int]:
    """Return the layers of each piece: no piece costs more than one must, then no stage, then all are even.

    A layer costs 1. The pieces come first since stages run the same chunk at about the same time and wait for the
    slowest. Of all cuts of ten small models, simulated, it was the fastest in five; the median loss was under 3 %, the
    largest 15 %, where one head cost as much as five layers.

    Args:
        first: cost of what the first piece holds besides layers; ``last`` of the last piece.

    Raises:
        ValueError: fewer layers than pieces.
    """
    num_pieces = num_stages * num_chunks
    if num_layers < num_pieces:
        raise ValueError(
            f"{num_layers} layers can be cut into 1 to {num_layers} pieces, got {num_stages} stages x {num_chunks} "
            f"chunks = {num_pieces}"
        )
    besides = [0.0] * num_pieces
    besides[0] += first
    besides[-1] += last
    evenly = _filled(besides, num_layers, Placement(num_pieces), inf)
    limit = max(cost + count for cost, count in zip(besides, evenly, strict=True))
    return _filled(besides, num_layers, Placement(num_stages, num_chunks, placement), limit)


def _filled(besides: Sequence[float], num_layers: int, placement: Placement, limit: float) -> list[int]:
    """Give each piece a layer, then each other layer to the cheapest stage, there to the cheapest piece below a limit.

    Of equals the last is taken: an early one keeps more micro-batches.
    """
    pieces = [cost + 1 for cost in besides]
    beside = [placement.own_pieces(placement.stage_of(piece)) for piece in range(len(pieces))]
    for _ in range(num_layers - len(pieces)):
        open_ones = [i for i, cost in enumerate(pieces) if cost + 1 <= limit * (1 + 1e-9)]
        place = min(open_ones, key=lambda i: (sum(pieces[n] for n in beside[i]), pieces[i], -i))
        pieces[place] += 1
    return [round(cost - own) for cost, own in zip(pieces, besides, strict=True)]


def partition_balanced(costs: Sequence[float], parts: int) -> list[int]:
    """Return bounds ``[0, ..., len(costs)]`` of contiguous, non-empty parts whose most expensive one is cheapest.

    Among those the parts are as even as can be (least sum of squares), shorter ones first: an early stage keeps more
    micro-batches.

    Raises:
        ValueError: more parts than costs, or less than one part.
    """
    count = len(costs)
    if not 1 <= parts <= count:
        raise ValueError(f"{count} layers can be cut into 1 to {count} parts, got {parts}")
    cost_of = _sums(costs)
    limit, _ = _cheapest_cut(count, parts, cost_of, max)

    def price(start: int, stop: int) -> float:
        cost = cost_of(start, stop)
        return cost * cost if cost <= limit else inf

    return _cheapest_cut(count, parts, price, add)[1]


# How layers of unequal cost are cut into the pieces of several chunks.


def partition_balanced_chunks(costs: Sequence[float], stages: int, chunks: int, placement: str = LOOP) -> list[int]:
    """Return the bounds of contiguous pieces: none costs more than one must, then no stage, then all are even.

    The rule of ``tds.partition.partition_uniform_chunks`` for layers that differ; the second and third part are sought
    from the most even pieces by moving one bound at a time.

    Raises:
        ValueError: fewer layers than pieces.
    """
    bounds = partition_balanced(costs, stages * chunks)
    limit = max(_pieces(costs, bounds))

    def price(cut: list[int]) -> tuple[float, float, float]:
        pieces = _pieces(costs, cut)
        by_stage = stage_sums(pieces, stages, placement)
        return max(limit, *pieces), max(by_stage), sum(piece * piece for piece in pieces)

    while True:
        best = min(_moved_bounds(bounds), key=price, default=bounds)
        if price(best) >= price(bounds):
            return bounds
        bounds = best


def _pieces(costs: Sequence[float], bounds: Sequence[int]) -> list[float]:
    return [sum(costs[start:stop]) for start, stop in zip(bounds, bounds[1:], strict=False)]


def _moved_bounds(bounds: list[int]) -> Iterator[list[int]]:
    """Yield the cuts in which one inner bound lies one layer off and no piece is empty."""
    for place in range(1, len(bounds) - 1):
        for moved in (bounds[place] - 1, bounds[place] + 1):
            if bounds[place - 1] < moved < bounds[place + 1]:
                yield [*bounds[:place], moved, *bounds[place + 1 :]]
