"""Elastic: the layout of a job that has fewer ranks than it may have.

The rule, a function of the flags and the number of ranks alone, so that every rank comes to the same by itself:

* The flags say what they say for all ranks that there may be, MAX nodes of ``--nnodes MIN:MAX``: so the global batch is
  the same with any number, and so is the order of the samples.
* Tensor, pipe and context sizes and the micro-batch are kept.
* There are as many replicas as the ranks allow, with one whole micro-batch or more each in every step. Where the
  micro-batches of a step cannot be shared out alike, the first replicas take one more.
* Replicas that meet within a micro-batch take equal numbers, so there may be fewer of them: with experts, and from ZeRO
  2 on. So do those of a run whose batch grows (--rampup-batch-size).
* Ranks that are left over have no work. They end at once, and their nodes stand by.
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
    possible = range(min(num_ranks, span.most, sizes[0] // batch.batch_size * each) // each, 0, -1)
    if may_be_unequal(config):
        return list(possible)
    return [count for count in possible if not any(size % (batch.batch_size * count) for size in sizes)]


def may_be_unequal(config: Config) -> bool:
    """Whether replicas may take unequal numbers of micro-batches: they meet behind the last one alone."""
    return config.optimizer.zero_stage < 2 and not config.model.num_experts and config.batch.rampup_batch_size is None


def with_replicas(config: Config, span: Span, count: int) -> Config:
    """Return ``config`` with the same global batch on ``count`` replicas."""
    batch = config.batch
    total = batch.global_batch_size(span.most // config.parallel.replica_size)
    most = -(-total // (batch.batch_size * count))
    requested = total if total < most * batch.batch_size * count else batch.requested_global_batch_size
    return replace(config, batch=replace(batch, gas=most, requested_global_batch_size=requested))


def describe(config: Config, span: Span, num_ranks: int, count: int) -> str:
    """Return in words what ``num_ranks`` of the most do."""
    each, batch = config.parallel.replica_size, config.batch
    idle = num_ranks - count * each
    gas = batch.gas_text(count)
    stand_by = f"; {idle} rank{'' if idle == 1 else 's'} stand{'s' if idle == 1 else ''} by" if idle else ""
    return (
        f"elastic: {num_ranks} of {span.most} ranks: {count} of {span.most // each} replicas, each with {gas} "
        f"micro-batches of {batch.batch_size} a step, {batch.global_batch_size(count)} samples as with all{stand_by}"
    )
