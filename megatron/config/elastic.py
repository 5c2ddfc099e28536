"""Layout of an elastic job with fewer ranks than its maximum.

The layout is a function of the flags and the world size only, so every rank computes it independently:

* The flags describe the job with all ranks, the MAX nodes of ``--nnodes MIN:MAX``. The global batch and the sample
  order are therefore the same for any world size.
* Tensor, pipe and context sizes and the micro-batch size do not change.
* The replica count is the largest that the ranks allow and that gives each replica at least one full micro-batch
  in every step. If the micro-batches of a step cannot be divided evenly, the first replicas run one more.
* Replicas that communicate within a micro-batch (with experts, and with ZeRO 2 and 3) need equal numbers of
  micro-batches, so there may be fewer replicas. The same applies if the batch grows (--rampup-batch-size).
* The remaining ranks have no work. They exit immediately, and their nodes remain on standby.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from megatron.config.config import Config
from megatron.errors import ConfigError

VARIABLE = "MEGATRON_ELASTIC"
"""Environment variable with the minimum and maximum number of ranks, such as "4:8"; set by the launcher."""


class RankRange(NamedTuple):
    """Minimum and maximum world size of a job."""

    min_ranks: int
    max_ranks: int


def parse_rank_range(env: Mapping[str, str]) -> RankRange | None:
    """Read the minimum and maximum world size from ``env``; None if the world size is fixed."""
    match = re.fullmatch(r"(\d+):(\d+)", env.get(VARIABLE, ""))
    return RankRange(int(match.group(1)), int(match.group(2))) if match else None


def check_min_ranks(config: Config, span: RankRange) -> None:
    """Check that the minimum world size is enough for the layout.

    Raises:
        ConfigError: the minimum is less than the ranks of one replica.
    """
    size = config.parallel.replica_size
    if span.min_ranks < size:
        raise ConfigError(
            "the minimum number of ranks must be at least the ranks of one replica, got MIN of --nnodes MIN:MAX for "
            f"{span.min_ranks} of {span.max_ranks} ranks, and tensor x pipe x context = {size} ranks per replica. "
            "Raise MIN, or lower --model-parallel-size, --pipe-parallel-size or --context-parallel-size"
        )


def replica_counts(config: Config, span: RankRange, num_ranks: int) -> list[int]:
    """List the possible replica counts on ``num_ranks`` ranks, the largest first."""
    replica_size, batch = config.parallel.replica_size, config.batch
    batch_sizes = batch.batch_sizes(span.max_ranks // replica_size).all()
    possible = range(
        min(num_ranks, span.max_ranks, batch_sizes[0] // batch.batch_size * replica_size) // replica_size, 0, -1
    )
    if allows_unequal_shares(config):
        return list(possible)
    return [count for count in possible if not any(size % (batch.batch_size * count) for size in batch_sizes)]


def allows_unequal_shares(config: Config) -> bool:
    """Check if replicas may run unequal micro-batch counts: they synchronize only after the last micro-batch."""
    return config.optimizer.zero_stage < 2 and not config.model.num_experts and not config.batch.has_growing_batch


def with_replicas(config: Config, span: RankRange, num_replicas: int) -> Config:
    """Return ``config`` with the same global batch on ``num_replicas`` replicas."""
    batch = config.batch
    total = batch.global_batch_size(span.max_ranks // config.parallel.replica_size)
    gas = -(-total // (batch.batch_size * num_replicas))
    requested = total if total < gas * batch.batch_size * num_replicas else batch.requested_global_batch_size
    return replace(config, batch=replace(batch, gas=gas, requested_global_batch_size=requested))


def describe(config: Config, span: RankRange, num_ranks: int, num_replicas: int) -> str:
    """Describe how ``num_ranks`` out of the maximum are used."""
    size, batch = config.parallel.replica_size, config.batch
    idle = num_ranks - num_replicas * size
    gas = batch.describe_gas(num_replicas)
    standby = f"; {idle} rank{'' if idle == 1 else 's'} on standby" if idle else ""
    return (
        f"elastic: {num_ranks} of {span.max_ranks} ranks: {num_replicas} of {span.max_ranks // size} replicas, each "
        f"with {gas} micro-batches of {batch.batch_size} per step, the same {batch.global_batch_size(num_replicas)} "
        f"samples as with all ranks{standby}"
    )
