"""Whether the training would take a layout: its own checks, on the configuration that the pasted lines would make."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megatron.config.validate import find_problems
from megatron.planner.layout import Layout
from megatron.planner.lines import TOLD, said_schedule


def problems(config: Any, layout: Layout) -> list[str]:
    """Return what the training's checks say against ``layout`` of the model and the other flags of ``config``."""
    return find_problems(config_of(config, layout), layout.world_size)


def config_of(config: Any, layout: Layout) -> Any:
    """Return ``config`` with the sizes and flags of ``layout`` in place of its own, as ``lines`` spells them."""
    schedule, is_full = said_schedule(layout), layout.recompute == "full"
    parallel = replace(
        config.parallel,
        model_parallel_size=layout.tensor,
        pipe_parallel_size=layout.pipe,
        pipeline_chunks=layout.chunks,
        pipeline_schedule=schedule,
        sequence_parallel=layout.sequence_parallel,
        checkpoint_activations=is_full,
        recompute_granularity="selective" if layout.recompute == "selective" else None,
    )
    optimizer = replace(
        config.optimizer,
        zero_stage=layout.zero_stage,
        offload_optimizer=layout.offload_optimizer,
        offload_parameters=layout.offload_parameters,
    )
    batch = replace(
        config.batch,
        batch_size=layout.micro_batch_size,
        gas=layout.num_micro_batches,
        requested_global_batch_size=0,
    )
    said = {
        "pipeline_chunks": layout.chunks > 1,
        "pipeline_schedule": schedule is not None,
        "zero_stage": layout.zero_stage > 0,
        "checkpoint_activations": is_full,
        "recompute_granularity": layout.recompute == "selective",
        "sequence_parallel": layout.sequence_parallel,
        "offload_optimizer": layout.offload_optimizer,
        "offload_parameters": layout.offload_parameters,
    }
    given = (*(name for name in config.given if name not in TOLD), *(name for name, is_said in said.items() if is_said))
    return replace(
        config,
        parallel=parallel,
        optimizer=optimizer,
        batch=batch,
        precision=replace(config.precision, dtype=layout.dtype),
        run=replace(config.run, dry_run=True),
        given=given,
    )
