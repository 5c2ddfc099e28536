"""Elastic: the layout of a job that has fewer ranks than it may have.

The rule, a function of the flags and the number of ranks alone, so that every rank comes to the same by itself:

* The flags say what they say for all ranks that there may be, MAX nodes of ``--nnodes MIN:MAX``: so the global batch is
  the same with any number, and so is the order of the samples.
* Tensor, pipe and context sizes and the micro-batch are kept.
* There are as many replicas as the ranks allow, but so that each takes the same number of whole micro-batches in every
  step (of each size of --rampup-batch-size), and all else that the flags ask for fits (experts, ZeRO).
* Ranks that are left over have no work. They end at once, and their nodes stand by.

Unequal numbers of micro-batches would be more than another rule here: replicas of ZeRO 2 and 3 and of experts meet in
every micro-batch, and sums of gradients are means over replicas.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from megatron.config.config import Config
from megatron.errors import ConfigError

VARIABLE = "MEGATRON_ELASTIC"
"""Says the fewest and the most ranks, as in "4:8"; the launcher sets it."""


class Span(NamedTuple):
    """The fewest and the most ranks of a job."""

    fewest: int
    most: int


def span_of(env: Mapping[str, str]) -> Span | None:
    """Return what ``env`` says, None where the number of ranks does not change."""
    found = re.fullmatch(r"(\d+):(\d+)", env.get(VARIABLE, ""))
    return Span(int(found.group(1)), int(found.group(2))) if found else None


def check_fewest(config: Config, span: Span) -> None:
    """Check that the fewest ranks hold the layout.

    Raises:
        ConfigError: they do not hold one replica.
    """
    each = config.parallel.replica_size
    if span.fewest < each:
        raise ConfigError(
            f"the fewest ranks must hold one replica, got MIN of --nnodes MIN:MAX for {span.fewest} of {span.most} "
            f"ranks, and tensor x pipe x context = {each} ranks of a replica. Raise MIN, or lower "
            "--model-parallel-size, --pipe-parallel-size or --context-parallel-size"
        )


def replica_counts(config: Config, span: Span, num_ranks: int) -> list[int]:
    """Return the numbers of replicas that ``num_ranks`` may be used for, the largest first."""
    each, batch = config.parallel.replica_size, config.batch
    sizes = batch.sizes(span.most // each).all()
    possible = range(min(num_ranks, span.most) // each, 0, -1)
    return [count for count in possible if not any(size % (batch.batch_size * count) for size in sizes)]


def with_replicas(config: Config, span: Span, count: int) -> Config:
    """Return ``config`` with the same global batch on ``count`` replicas."""
    batch = config.batch
    total = batch.global_batch_size(span.most // config.parallel.replica_size)
    return replace(config, batch=replace(batch, gas=total // (batch.batch_size * count)))


def describe(config: Config, span: Span, num_ranks: int, count: int) -> str:
    """Return in words what ``num_ranks`` of the most do."""
    each, batch = config.parallel.replica_size, config.batch
    idle = num_ranks - count * each
    stand_by = f"; {idle} rank{'' if idle == 1 else 's'} stand{'s' if idle == 1 else ''} by" if idle else ""
    return (
        f"elastic: {num_ranks} of {span.most} ranks: {count} of {span.most // each} replicas, each with {batch.gas} "
        f"micro-batches of {batch.batch_size} a step, {batch.global_batch_size(count)} samples as with all{stand_by}"
    )
