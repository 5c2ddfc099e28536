"""The rule by which a search ranks layouts, computed from all of them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

from megatron.planner.estimate import Estimate


def priced(one: Estimate) -> float:
    """Return the step time by which layouts are compared; splitting backward passes must gain at least 1 %."""
    return one.step_s * (1.01 if one.layout.schedule == "zb-h1" else 1.0)


def preference(one: Estimate) -> tuple[int, int]:
    """Return the sort key among layouts that are equally fast."""
    return one.layout.zero_stage, one.most_bytes


def check_ranking(ranked: Sequence[Estimate], fitting: Iterable[Estimate]) -> None:
    """Check a ranking against all layouts that fit: of those within 3 % the lower ZeRO stage, then the least memory."""
    grids = defaultdict(list)
    for one in fitting:
        grids[one.layout.tensor, one.layout.pipe].append(one)
    fastest = {grid: min(map(priced, every)) for grid, every in grids.items()}
    chosen = {
        grid: min((one for one in every if priced(one) <= 1.03 * fastest[grid]), key=preference)
        for grid, every in grids.items()
    }
    for one in ranked:
        least = min(fastest[grid] for grid in chosen)
        ties = [other for other in chosen.values() if priced(other) <= 1.03 * least]
        assert preference(one) == min(map(preference, ties))
        assert preference(one) == preference(chosen.pop((one.layout.tensor, one.layout.pipe)))
