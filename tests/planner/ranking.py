"""The rule by which a search ranks layouts, computed from all of them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

from megatron.planner.estimate import Estimate


def priced_step_s(estimate: Estimate) -> float:
    """Return the step time by which layouts are compared; splitting backward passes must gain at least 1 %."""
    return estimate.step_s * (1.01 if estimate.layout.schedule in ("zb-h1", "zb-v", "dualpipev") else 1.0)


def preference_key(estimate: Estimate) -> tuple[int, int]:
    """Return the sort key among layouts that are equally fast."""
    return estimate.layout.zero_stage, estimate.max_bytes


def check_ranking(ranked: Sequence[Estimate], fitting: Iterable[Estimate]) -> None:
    """Check a ranking against all layouts that fit: of those within 3 % the lower ZeRO stage, then the least memory."""
    grids = defaultdict(list)
    for estimate in fitting:
        grids[estimate.layout.tensor, estimate.layout.pipe].append(estimate)
    fastest = {grid: min(map(priced_step_s, candidates)) for grid, candidates in grids.items()}
    chosen = {
        grid: min(
            (estimate for estimate in candidates if priced_step_s(estimate) <= 1.03 * fastest[grid]), key=preference_key
        )
        for grid, candidates in grids.items()
    }
    for estimate in ranked:
        fastest_s = min(fastest[grid] for grid in chosen)
        ties = [candidate for candidate in chosen.values() if priced_step_s(candidate) <= 1.03 * fastest_s]
        assert preference_key(estimate) == min(map(preference_key, ties))
        assert preference_key(estimate) == preference_key(chosen.pop((estimate.layout.tensor, estimate.layout.pipe)))
