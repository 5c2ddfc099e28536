"""Estimates for a run: memory by stage, and pipeline bubble. No torch."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from megatron import accelerators
from megatron.config import Config
from megatron.costs.memory import BYTES, Memory, Zero, saved_activations_of
from megatron.models import registry
from megatron.mpu.topology import Topology
from tds.schedule import Costs, simulate
from tds.schedule.simulate import candidate_schedules, default_schedule, order_named, placement_for

DRIVER_FILES = ("nvidia[0-9]*", "kfd", "dxg")
"""Device files in /dev of NVIDIA's driver, of AMD's, and of both under WSL."""


def is_config_model(config: Config, parameter_counts: Sequence[int]) -> bool:
    """Return True if the costs of the model are known, because it is the model that ``config`` describes.

    Args:
        parameter_counts: parameter counts of the model that was built, which a script may define itself. The first
            one, for the full model, is compared with the model in ``config``.
    """
    return config.model.vocab_size is not None and parameter_counts[0] == registry.costs_of(config).num_parameters


def stage_memory(config: Config, topology: Topology, bounds: Sequence[int], dtype: str) -> list[Memory]:
    """Estimate the memory per rank, by stage."""
    batch = config.batch
    return registry.costs_of(config, is_on_cpu=is_on_cpu(config)).memory_per_stage(
        bounds,
        micro_batch_size=batch.batch_size,
        num_micro_batches=batch.gas,
        tensor=topology.tensor,
        dtype=dtype if dtype in BYTES else "fp32",
        optimizer=config.optimizer.state_type,
        num_bf16_states=len(config.optimizer.bf16_states),
        num_8bit_states=len(config.optimizer.quantized_states),
        zero=zero_settings(config, topology.data_context),
        checkpoint_activations=config.parallel.checkpoint_activations,
        is_selective=config.parallel.recompute_granularity == "selective",
        sequence=topology.tensor if config.parallel.sequence_parallel else 1,
        waiting=saved_activations_of(config),
        is_compiled=config.parallel.compile,
        **schedule_args(config, bounds, topology.pipe),
    )


def zero_settings(config: Config, replicas: int) -> Zero:
    """Return the ZeRO settings in ``config`` for this replica count."""
    settings, prefetches = config.optimizer, config.parallel.stage3_prefetch_bucket_size > 0
    return Zero(settings.zero_stage, replicas, settings.offload_optimizer, settings.offload_parameters, prefetches)


def is_on_cpu(config: Config) -> bool:
    """Return True if a run on this machine would train on CPUs; False with --device cuda, even without a GPU."""
    if config.parallel.device != "auto" or not _may_have_device():
        return config.parallel.device in ("auto", "cpu")
    from megatron import device  # imports torch, which a dry run on CPUs does not need

    return device.choose("auto") == "cpu"


def _may_have_device() -> bool:
    """Return False if there is certainly no device, without importing torch: no plug-in and no GPU driver."""
    files = (path for pattern in DRIVER_FILES for path in Path("/dev").glob(pattern))
    return set(accelerators.names()) != {"cpu", "cuda"} or next(files, None) is not None


def schedule_args(config: Config, bounds: Sequence[int], num_stages: int) -> dict[str, Any]:
    """Return schedule, chunk count and placement as the model was built; a script may choose its own chunks."""
    chunks, placement = (len(bounds) - 1) // num_stages, config.parallel.placement
    parallel = config.parallel
    is_set_by_flag = parallel.pipeline_schedule or parallel.pipeline_schedule_file
    schedule = parallel.schedule if is_set_by_flag else default_schedule(chunks, placement)
    return {"schedule": schedule, "chunks": chunks, "placement": placement, "group_size": parallel.group_size}


# Expected pipeline bubble: the run's schedule, simulated with the estimated costs of its virtual stages.


def simulated_bubble(
    num_stages: int,
    num_micro_batches: int,
    schedule: str,
    num_chunks: int,
    chunk_costs: Sequence[float] | None,
    *,
    recomputes: bool = False,
) -> float:
    """Simulate a step's bubble, assuming that a backward takes twice as long as a forward and messages are free.

    Args:
        chunk_costs: forward cost by virtual stage, in any unit; None: equal costs.
        recomputes: each backward first recomputes the forward.
    """
    forward = [1.0] * (num_stages * num_chunks) if chunk_costs is None else chunk_costs
    backward_costs = tuple(2 * cost if recomputes else cost for cost in forward)
    layout = num_chunks, placement_for(schedule)
    order = order_named(schedule, *layout)
    actions = [order(num_stages, num_micro_batches, stage) for stage in range(num_stages)]
    return simulate(actions, Costs(tuple(forward), backward_costs, tuple(forward)), *layout).bubble


def make_bubble_estimator(
    config: Config, bounds: Sequence[int], parameter_counts: Sequence[int]
) -> Callable[[int], float]:
    """Return a function that maps the number of micro-batches to the expected bubble of the best candidate schedule.

    Args:
        bounds: virtual-stage bounds, as in ``megatron.training.dry_run.plan_rows``.
        parameter_counts: parameter counts from ``megatron.training.start_table.count_parameters``.
    """
    num_stages = config.parallel.num_stages
    schedule, chunks, placement, _ = schedule_args(config, bounds, num_stages).values()
    schedules = candidate_schedules(schedule, chunks, placement)
    costs = registry.costs_of(config).chunk_costs(bounds) if is_config_model(config, parameter_counts) else None
    recomputes = config.parallel.checkpoint_activations

    @functools.cache
    def expected_bubble(num_micro_batches: int) -> float:
        return min(
            simulated_bubble(num_stages, num_micro_batches, name, chunks, costs, recomputes=recomputes)
            for name in schedules
        )

    return expected_bubble
