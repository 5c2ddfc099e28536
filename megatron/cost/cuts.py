"""How layers of unequal cost are cut into the pieces of several chunks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from megatron.stages import balanced_bounds


def bounds_in_chunks(costs: Sequence[float], stages: int, chunks: int) -> list[int]:
    """Return the bounds of contiguous pieces: none costs more than one must, then no stage, then all are even.

    The rule of ``megatron.stages.layers_in_chunks`` for layers that differ; the second and third part are sought from
    the most even pieces by moving one bound at a time.

    Raises:
        ValueError: fewer layers than pieces.
    """
    bounds = balanced_bounds(costs, stages * chunks)
    limit = max(_pieces(costs, bounds))

    def price(cut: list[int]) -> tuple[float, float, float]:
        pieces = _pieces(costs, cut)
        by_stage = [sum(pieces[stage::stages]) for stage in range(stages)]
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
