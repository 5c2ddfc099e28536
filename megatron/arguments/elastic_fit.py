"""Fit the configuration of an elastic job to the ranks that are present. Does not import torch."""

from __future__ import annotations

from dataclasses import replace

from megatron.arguments.validate import find_problems
from megatron.config import Config, elastic
from megatron.errors import ConfigError, raise_all


def fit_to_ranks(config: Config, span: elastic.RankRange, num_ranks: int) -> tuple[Config, int]:
    """Fit ``config`` to an elastic job with ``num_ranks`` ranks, and count the ranks that have work.

    The result is the same on every rank.

    Raises:
        ConfigError: no layout fits these ranks.
    """
    elastic.check_min_ranks(config, span)
    problems: list[str] = []
    for num_replicas in elastic.replica_counts(config, span, num_ranks):
        fitted = elastic.with_replicas(config, span, num_replicas)
        num_used = num_replicas * config.parallel.replica_size
        layout_problems = find_problems(fitted, num_used)
        if not layout_problems:
            note = elastic.describe(fitted, span, num_ranks, num_replicas)
            return replace(fitted, notes=(*fitted.notes, note)), num_used
        problems = problems or layout_problems
    raise_all([f"with {num_ranks} of {span.max_ranks} ranks: {problem}" for problem in problems])
    raise ConfigError(
        f"no number of replicas on {num_ranks} of {span.max_ranks} ranks divides the global batch into micro-batches "
        f"of {config.batch.batch_size}. Lower --batch-size, or choose a global batch with more divisors"
    )
