"""What share of a step stages will idle: the run's own schedule, simulated with the estimated costs of its pieces."""

from __future__ import annotations

from collections.abc import Sequence

from tds.schedule import Costs, schedule_named, simulate


def simulated_bubble(
    num_stages: int,
    num_micro_batches: int,
    schedule: str,
    num_chunks: int,
    piece_costs: Sequence[float] | None,
    *,
    recomputes: bool = False,
) -> float:
    """Return the share of idle time of a step in which a backward takes twice a forward and messages cost nothing.

    Args:
        piece_costs: of each piece, in any unit; None: all the same.
        recomputes: each backward runs the forward again first.
    """
    forward = [1.0] * (num_stages * num_chunks) if piece_costs is None else piece_costs
    to_input = tuple(2 * cost if recomputes else cost for cost in forward)
    order = schedule_named(schedule, num_chunks)
    actions = [order(num_stages, num_micro_batches, stage) for stage in range(num_stages)]
    return simulate(actions, Costs(tuple(forward), to_input, tuple(forward)), num_chunks).bubble
