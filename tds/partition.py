"""Cutting layers into stages and chunks: balanced, equal layers in chunks, unequal layers in chunks, measured
times. No torch.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from math import inf
from operator import add
from typing import Any, Literal

from tds.schedule.actions import LOOP, Backward, Order, Placement
from tds.schedule.schedules import schedule_named
from tds.schedule.simulate import AUTO, candidates
from tds.schedule.validate import run

Bounds = list[int]


class PartitionError(ValueError):
    """Layers that cannot be split into stages as ``partition_method`` says."""


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
MOST_SIMULATED = 4_000_000
"""Actions that are simulated in search of a cut into chunks, about a microsecond each."""


def partition_by_times(
    times: Sequence[float], parameters: Sequence[int], num_stages: int, num_chunks: int = 1, placement: str = LOOP
) -> Bounds:
    """Return bounds by which a step takes as little time as can be; among equals, with even parameters.

    With one chunk a step is as fast as its slowest stage. With several, stages wait for each other in many ways, so
    each cut is simulated: all of them where they are few, else those to which moving bounds leads, from even pieces and
    from even stages.

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
    step = _SimulatedStep(num_stages, num_chunks, placement)
    price = _price_of_chunks(times, parameters, step)
    most = MOST_SIMULATED // step.num_actions
    if math.comb(len(times) - 1, num_pieces - 1) <= most:
        return _best(_every_cut(len(times), num_pieces), price)
    starts = (
        _cut_in_runs(times, parameters, num_pieces),
        partition_balanced_chunks(times, num_stages, num_chunks, placement),
    )
    return _improved(min(starts, key=price), price, most)


def _cut_in_runs(times: Sequence[float], parameters: Sequence[int], num_pieces: int) -> Bounds:
    time_of, parameters_of = _sums(times), _sums(parameters)
    slowest, _ = _cheapest_cut(len(times), num_pieces, time_of, max)
    limit = slowest * (1 + TOLERANCE)

    def price(start: int, stop: int) -> float:
        return parameters_of(start, stop) if time_of(start, stop) <= limit else inf

    return _cheapest_cut(len(times), num_pieces, price, max, "last")[1]


class _SimulatedStep:
    """What a step takes, of 4 p micro-batches and under all schedules for chunks that lie so, from times of pieces.

    As ``tds.schedule.simulate`` has it, with forward and both halves of a backward alike and messages for nothing; the
    order of events, which is always the same, is found once.
    """

    def __init__(self, num_stages: int, num_chunks: int, placement: str) -> None:
        self.lie = Placement(num_stages, num_chunks, placement)
        names = candidates(AUTO, num_chunks, placement)
        self._every = [_events(schedule_named(name, num_chunks, placement), self.lie) for name in names]
        self.num_actions = sum(map(len, self._every))

    def __call__(self, pieces: Sequence[float]) -> float:
        return sum(self._seconds(events, pieces) for events in self._every)

    def _seconds(self, events: Sequence[_Timed], pieces: Sequence[float]) -> float:
        free, arrived = [0.0] * self.lie.num_stages, [0.0] * (len(events) + 1)
        for number, (stage, piece, thirds, source) in enumerate(events, start=1):
            begin = arrived[source] if arrived[source] > free[stage] else free[stage]
            free[stage] = arrived[number] = begin + thirds * pieces[piece] / 3
        return max(free)


_Timed = tuple[int, int, int, int]
"""An action: its stage, its piece, how many thirds of the piece's time it takes, and the number, counted from 1, of the
action whose message it waits for; 0: none."""


def _events(order: Order, lie: Placement) -> list[_Timed]:
    stages = [order(lie.num_stages, 4 * lie.num_stages, stage) for stage in range(lie.num_stages)]
    found: list[_Timed] = []
    senders: dict[Any, int] = {}
    for event in run(stages, lie.num_chunks, placement=lie.kind):
        source = senders.pop((event.source, event.takes)) if event.source is not None else 0
        piece = lie.piece(event.stage, event.action.chunk)
        found.append((event.stage, piece, 2 if isinstance(event.action, Backward) else 1, source))
        if event.target is not None:
            senders[event.target, event.sends] = len(found)
    return found


_Price = Callable[[Bounds], tuple[float, float]]


def _price_of_chunks(times: Sequence[float], parameters: Sequence[int], step: _SimulatedStep) -> _Price:
    """Return what gives the time of a step of a cut, and the parameters of its largest stage."""
    time_of, parameters_of = _sums(times), _sums(parameters)

    def price(bounds: Bounds) -> tuple[float, float]:
        runs = list(itertools.pairwise(bounds))
        held = stage_sums([parameters_of(*run) for run in runs], step.lie.num_stages, step.lie.kind)
        return step([time_of(*run) for run in runs]), max(held)

    return price


def _every_cut(num_layers: int, num_pieces: int) -> Iterator[Bounds]:
    for inner in itertools.combinations(range(1, num_layers), num_pieces - 1):
        yield [0, *inner, num_layers]


def _best(cuts: Iterable[Bounds], price: _Price) -> Bounds:
    scored = [(*price(bounds), bounds) for bounds in cuts]
    limit = min(time for time, _, _ in scored) * (1 + TOLERANCE)
    return min((weight, time, bounds) for time, weight, bounds in scored if time <= limit)[2]


def _improved(bounds: Bounds, price: _Price, most: int) -> Bounds:
    """Take each move that helps, until none does or ``most`` were tried."""
    now, tried, is_better = price(bounds), 0, True
    while is_better:
        is_better = False
        for each in _moved(bounds):
            if tried == most:
                return bounds
            tried += 1
            if (found := price(each)) < now:
                now, bounds, is_better = found, each, True
                break
    return bounds


def _moved(bounds: Bounds) -> Iterator[Bounds]:
    """Yield the cuts with one or two inner bounds a layer off, or one two layers off, and no piece empty."""
    inner = range(1, len(bounds) - 1)
    single = [(place, by) for by in (1, -1, 2, -2) for place in inner]
    steps = [(place, by) for place, by in single if abs(by) == 1]
    pairs = (pair for pair in itertools.combinations(steps, 2) if pair[0][0] != pair[1][0])
    for moves in itertools.chain(((move,) for move in single), pairs):
        each = list(bounds)
        for place, by in moves:
            each[place] += by
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
