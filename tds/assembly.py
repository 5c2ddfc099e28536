"""What the engine builds once: its stage, its schedule, its view of the optimizer."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from tds import auto, channels, section, watchdog
from tds.announce import announce
from tds.data_agreement import DataAgreement
from tds.deepspeed_api import checkpointing, choose_recomputed, layer_specs, place_of
from tds.engine_parts import EngineParts
from tds.exchange import Exchange
from tds.gradients import GradientSource
from tds.module import PipelineModule
from tds.optimizers import gradients_of
from tds.plan import Plan
from tds.recompute import is_deepspeeds_reentrant
from tds.reduction import Reduction
from tds.sharing import sharing_layers
from tds.stage import Stage
from tds.torch_api import default_timeout
from tds.transport import Links
from tds.wire import Slice


def refuse_unsupported(engine: EngineParts) -> None:
    """Raise for what would train wrongly in silence."""
    if not isinstance(engine.module, PipelineModule) and sharing_layers(layer_specs(engine.module)):
        raise TypeError(
            f"layers that share modules need tds.PipelineModule, got {type(engine.module).__module__}."
            f"{type(engine.module).__name__}: there nobody builds what they share"
        )
    if engine.has_moe_layers:
        raise NotImplementedError("the pipeline engine of tds does not train DeepSpeed's MoE layers; use DeepSpeed's")
    section.accepted(engine.config_given)
    if engine.torch_autocast_enabled():
        raise NotImplementedError(
            'the pipeline engine of tds does not act on "torch_autocast"; use "bf16" or "fp16", or '
            "torch.autocast inside your layers"
        )
    if engine.zero_optimization_stage() >= 2:
        raise ValueError(
            f"ZeRO stages 2 and 3 cut gradients that a pipeline still adds to, got zero_optimization.stage="
            f"{engine.zero_optimization_stage()}; use 0 or 1"
        )


def tell_what_acts_on_nothing(engine: EngineParts) -> None:
    """Say on rank 0 which keys of the JSON a program has set that act on DeepSpeed's own engine alone."""
    given = engine.config_given
    found: list[str] = [key for key in ("prescale_gradients", "gradient_predivide_factor") if key in given]
    found += [key for key in ("pipe_partitioned", "grad_partitioned") if key in given.get("pipeline", {})]
    if found and engine.global_rank == 0:
        listed = ", ".join(f'"{key}"' for key in found)
        announce(
            f"{listed} in the JSON act on nothing in tds: it divides gradients once, after their sums, and a boundary "
            "says of each tensor whether it is cut over the tensor group"
        )
    if engine.asks_for_flops and engine.global_rank == 0:
        announce(
            '"flops_profiler" in the JSON profiles nothing in tds. Use "pipeline": {"trace": "a folder"}, or run '
            "deepspeed.profiling.flops_profiler.get_model_profile on a layer"
        )


def configure_recompute(engine: EngineParts) -> None:
    """Take over the JSON's recompute settings. A checkpoint function of the user's own stays: it may restore more."""
    section, module = engine.pipeline_section, engine.module
    if section.get("use_reentrant") is False and is_deepspeeds_reentrant(module.activation_checkpoint_func):
        module.activation_checkpoint_func = checkpointing.non_reentrant_checkpoint
    if section.get("activation_checkpoint_interval", 0) > 0:
        module.activation_checkpoint_interval = section["activation_checkpoint_interval"]
    if module.activation_checkpoint_interval > 0:
        choose_recomputed(module)


def make_gradients(engine: EngineParts) -> GradientSource | None:
    """Return where gradients lie; None for an engine that only evaluates."""
    if engine.optimizer is None:
        return None
    return gradients_of(engine.optimizer, engine.zero_optimization_stage())


def make_reduction(engine: EngineParts, gradients: GradientSource | None) -> Reduction | None:
    """Return the sums over replicas; None with one replica, or for an engine that only evaluates."""
    if gradients is None or engine.grid.data_parallel_size == 1:
        return None
    module = engine.module
    own = getattr(module, "parameters_of", lambda _: list(module.parameters()))
    chunks = [own(chunk) for chunk in range(num_chunks(module))]
    tied = [weight for weight, group in module.get_tied_weights_and_groups() if dist.get_world_size(group) > 1]
    every, group = list(module.parameters()), engine.grid.get_data_parallel_group()
    starts_early = section.overlaps_reduction(engine.pipeline_section)
    return Reduction(every, chunks, tied, gradients, group, dtype=engine.sums_dtype, starts_early=starts_early)


def make_stage(engine: EngineParts) -> Stage:
    """Return this rank's stage with its messages. Collective over all ranks."""
    grid = engine.grid
    cut = Slice()
    if grid.model_parallel_size > 1:
        group = grid.get_slice_parallel_group()
        cut = Slice(grid.get_slice_parallel_rank(), grid.model_parallel_size, group)
    device = torch.device(engine.device)
    ranks = [grid.stage_to_global(stage) for stage in range(engine.num_stages)]
    chunks = num_chunks(engine.module)
    limit = section.wait_limit(engine.pipeline_section, default_timeout())
    groups, must_open = channels.message_groups(grid, device, chunks, limit)
    if must_open:
        channels.open_channels(groups, ranks, engine.stage_id, device, chunks)
    links = Links(engine.stage_id, ranks, groups, cut, device, limit)
    exchange = Exchange(links, engine.module, num_chunks=chunks, is_dynamic=engine.module.dynamic_shape)
    return Stage(engine.module, exchange, device)


def make_data_agreement(engine: EngineParts, compares: bool) -> DataAgreement | None:
    """Return how all ranks agree on their data; None for one rank, which needs no other."""
    if dist.get_world_size() == 1:
        return None
    grid = engine.grid
    return DataAgreement(
        engine.module.world_group,
        stage=engine.stage_id,
        replica=grid.get_data_parallel_rank(),
        device=torch.device(engine.device),
        name_of=lambda rank: watchdog.name_of(rank, place_of(grid, rank)),
        compares=compares,
    )


def make_plan(engine: EngineParts) -> Plan:
    """Return the schedule that the JSON asks for; that which "auto" starts with."""
    chosen = section.chosen_schedule(engine.pipeline_section, engine.module)
    return Plan(
        auto.first_name(num_chunks(engine.module)) if section.is_auto(chosen) else chosen,
        num_stages=engine.num_stages,
        num_chunks=num_chunks(engine.module),
        stage=engine.stage_id,
    )


def num_chunks(module: Any) -> int:
    """Return how many chunks of layers each stage of ``module`` has; DeepSpeed's own modules have one."""
    return getattr(module, "chunks", 1)
