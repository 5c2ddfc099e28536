"""What share of a step stages will idle: the run's own schedule, simulated with the estimated costs of its pieces."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

from megatron import cost
from megatron.config import Config
from megatron.stages import by_default, candidates
from megatron.training.plan import is_known
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


def bubble_of_run(config: Config, bounds: Sequence[int], counted: Sequence[int]) -> Callable[[int], float]:
    """Return the function from micro-batches of a step to the share of idle time; of several schedules the best.

    Args:
        bounds: of the pieces, as ``megatron.training.plan.plan_rows`` takes them.
        counted: as ``megatron.training.report.count_parameters`` returns it.
    """
    stages = config.parallel.num_stages
    chunks = (len(bounds) - 1) // stages
    names = candidates(config.parallel.pipeline_schedule or by_default(chunks), chunks)
    costs = cost.of(config).piece_costs(bounds) if is_known(config, counted) else None
    recomputes = config.parallel.checkpoint_activations

    @functools.cache
    def predicted(num_micro_batches: int) -> float:
        return min(
            simulated_bubble(stages, num_micro_batches, name, chunks, costs, recomputes=recomputes) for name in names
        )

    return predicted
