"""What a run will take, by arithmetic: memory of each stage, share of a step that stages idle (no torch)."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from megatron import accelerators
from megatron.config import Config
from megatron.costs.memory import BYTES, Memory, Zero, waiting_of
from megatron.models import registry
from megatron.mpu.topology import Topology
from tds.schedule import Costs, simulate
from tds.schedule.simulate import by_default, candidates, order_named, placement_for

DRIVER_FILES = ("nvidia[0-9]*", "kfd", "dxg")
"""In /dev: of NVIDIA's driver, of AMD's, and of both under Windows."""


def is_known(config: Config, counted: Sequence[int]) -> bool:
    """Return whether a model of ``counted[0]`` parameters is the one that ``config`` describes, whose costs we know."""
    return config.model.vocab_size is not None and counted[0] == registry.costs_of(config).num_parameters


def stage_memory(config: Config, topology: Topology, bounds: Sequence[int], dtype: str) -> list[Memory]:
    """Return an estimate of what one rank of each stage holds."""
    batch = config.batch
    return registry.costs_of(config, is_on_cpu=is_on_cpu(config)).memory_per_stage(
        bounds,
        micro_batch_size=batch.batch_size,
        num_micro_batches=batch.gas,
        tensor=topology.tensor,
        dtype=dtype if dtype in BYTES else "fp32",
        optimizer=config.optimizer.state_type,
        num_bf16_states=len(config.optimizer.bf16_states),
        zero=zero_of(config, topology.data_context),
        checkpoint_activations=config.parallel.checkpoint_activations,
        is_selective=config.parallel.recompute_granularity == "selective",
        sequence=topology.tensor if config.parallel.sequence_parallel else 1,
        waiting=waiting_of(config),
        is_compiled=config.parallel.compile,
        **schedule_of(config, bounds, topology.pipe),
    )


def zero_of(config: Config, replicas: int) -> Zero:
    """Return how so many replicas share what they hold."""
    settings, prefetches = config.optimizer, config.parallel.stage3_prefetch_bucket_size > 0
    return Zero(settings.zero_stage, replicas, settings.offload_optimizer, settings.offload_parameters, prefetches)


def is_on_cpu(config: Config) -> bool:
    """Return whether a run here would train on CPUs; a plan for GPUs may be made where there are none."""
    if config.parallel.device != "auto" or not _may_have_device():
        return config.parallel.device in ("auto", "cpu")
    from megatron import device  # it imports torch, which a dry run on CPUs does without

    return device.choose("auto") == "cpu"


def _may_have_device() -> bool:
    """Return False where torch need not be asked: without a plug-in, and without a file of any driver of GPUs."""
    files = (path for pattern in DRIVER_FILES for path in Path("/dev").glob(pattern))
    return set(accelerators.names()) != {"cpu", "cuda"} or next(files, None) is not None


def schedule_of(config: Config, bounds: Sequence[int], stages: int) -> dict[str, Any]:
    """Return the schedule's name, and the chunks as they were built: a script may have its own."""
    chunks, placement = (len(bounds) - 1) // stages, config.parallel.placement
    parallel = config.parallel
    is_said = parallel.pipeline_schedule or parallel.pipeline_schedule_file
    named = parallel.schedule if is_said else by_default(chunks, placement)
    return {"schedule": named, "chunks": chunks, "placement": placement, "group_size": parallel.group_size}


# What share of a step stages will idle: the run's own schedule, simulated with the estimated costs of its pieces.


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
    lie = num_chunks, placement_for(schedule)
    order = order_named(schedule, *lie)
    actions = [order(num_stages, num_micro_batches, stage) for stage in range(num_stages)]
    return simulate(actions, Costs(tuple(forward), to_input, tuple(forward)), *lie).bubble


def bubble_of_run(config: Config, bounds: Sequence[int], counted: Sequence[int]) -> Callable[[int], float]:
    """Return the function from micro-batches of a step to the share of idle time; of several schedules the best.

    Args:
        bounds: of the pieces, as ``megatron.training.dry_run.plan_rows`` takes them.
        counted: as ``megatron.training.start_table.count_parameters`` returns it.
    """
    stages = config.parallel.num_stages
    schedule, chunks, placement, _ = schedule_of(config, bounds, stages).values()
    names = candidates(schedule, chunks, placement)
    costs = registry.costs_of(config).piece_costs(bounds) if is_known(config, counted) else None
    recomputes = config.parallel.checkpoint_activations

    @functools.cache
    def predicted(num_micro_batches: int) -> float:
        return min(
            simulated_bubble(stages, num_micro_batches, name, chunks, costs, recomputes=recomputes) for name in names
        )

    return predicted
