"""Cutting layers into stages by their measured times."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence

TOLERANCE = 0.01
"""Times within this share of the best count as equal: a measurement is no better."""
TRIED_ONE_BY_ONE = 20_000

Bounds = list[int]


def partition_by_times(
    times: Sequence[float], parameters: Sequence[int], num_stages: int, num_chunks: int = 1
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
    score = _scorer(times, parameters, num_stages)
    if math.comb(len(times) - 1, num_pieces - 1) <= TRIED_ONE_BY_ONE:
        return _best(_every_cut(len(times), num_pieces), score)
    start = _cut_in_runs(times, parameters, num_pieces)
    return _improved(start, score)


def _cut_in_runs(times: Sequence[float], parameters: Sequence[int], num_pieces: int) -> Bounds:
    slowest = _smallest_maximum(times, num_pieces, lambda start, stop: True)[0]
    upto = [0.0, *itertools.accumulate(times)]
    limit = slowest * (1 + TOLERANCE)
    return _smallest_maximum(parameters, num_pieces, lambda start, stop: upto[stop] - upto[start] <= limit)[1]


def _smallest_maximum(
    weights: Sequence[float], num_pieces: int, is_allowed: Callable[[int, int], bool]
) -> tuple[float, Bounds]:
    """Return (the smallest possible largest piece, its bounds) over cuts into non-empty pieces that are allowed."""
    size = len(weights)
    upto = [0.0, *itertools.accumulate(weights)]
    best = [0.0] + [math.inf] * size
    came_from: list[list[int]] = []
    for piece in range(num_pieces):
        row, previous = [math.inf] * (size + 1), [-1] * (size + 1)
        for stop in range(piece + 1, size - (num_pieces - piece - 1) + 1):
            for start in range(stop - 1, piece - 1, -1):
                own = upto[stop] - upto[start]
                if own >= row[stop]:
                    break
                largest = max(best[start], own)
                if largest < row[stop] and is_allowed(start, stop):
                    row[stop], previous[stop] = largest, start
        best = row
        came_from.append(previous)
    bounds = [size]
    for previous in reversed(came_from):
        bounds.insert(0, previous[bounds[0]])
    return best[size], bounds


def _scorer(
    times: Sequence[float], parameters: Sequence[int], num_stages: int
) -> Callable[[Bounds], tuple[float, float]]:
    def largest(weights: Sequence[float], bounds: Bounds) -> float:
        pieces = [sum(weights[start:stop]) for start, stop in itertools.pairwise(bounds)]
        return max(sum(pieces[stage::num_stages]) for stage in range(num_stages))

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
