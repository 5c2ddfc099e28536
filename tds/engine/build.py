"""What the engine builds once: stage, schedule, gradient reducer."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from tds import torch_api
from tds.deepspeed.api import checkpointing, choose_recomputed, layer_specs, place_of
from tds.deepspeed.module import PipelineModule
from tds.deepspeed.optimizers import gradients_of
from tds.deepspeed.shared_layers import sharing_layers
from tds.engine import auto_schedule
from tds.engine.data_consistency import DataConsistency
from tds.engine.engine_parts import EngineParts
from tds.engine.pipeline_json import (
    accepted,
    chosen_schedule,
    group_size,
    max_ctas,
    overlaps_reduction,
    reduce_bucket_size,
    splits_by_graph,
    wait_limit,
)
from tds.engine.recompute import is_deepspeeds_reentrant
from tds.engine.schedule_plan import SchedulePlan
from tds.engine.stage import Stage
from tds.gradient_reducer import ChunkOrder, GradientReducer
from tds.gradients import GradientSource, bucket_numbers, is_reduced_apart
from tds.log import log_rank_0
from tds.p2p import process_groups
from tds.p2p.communicator import P2PCommunicator
from tds.p2p.packed_layout import Slice
from tds.p2p.transport import StageLinks
from tds.schedule import LOOP, Kind, Placement
from tds.torch_api import default_timeout
from tds.watchdog import watchdog


def refuse_unsupported(engine: EngineParts) -> None:
    """Raise for what would train wrongly in silence."""
    if not isinstance(engine.module, PipelineModule) and sharing_layers(layer_specs(engine.module)):
        raise TypeError(
            f"layers that share modules need tds.PipelineModule, got {type(engine.module).__module__}."
            f"{type(engine.module).__name__}: there nobody builds what they share"
        )
    if engine.has_moe_layers:
        raise NotImplementedError("the pipeline engine of tds does not train DeepSpeed's MoE layers; use DeepSpeed's")
    accepted(engine.config_given)
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


def log_unused_settings(engine: EngineParts) -> None:
    """Say on rank 0 which keys of the JSON a program has set that act on DeepSpeed's own engine alone."""
    given = engine.config_given
    found: list[str] = [key for key in ("prescale_gradients", "gradient_predivide_factor") if key in given]
    found += [key for key in ("pipe_partitioned", "grad_partitioned") if key in given.get("pipeline", {})]
    if found and engine.global_rank == 0:
        listed = ", ".join(f'"{key}"' for key in found)
        log_rank_0(
            f"{listed} in the JSON act on nothing in tds: it divides gradients once, after their sums, and a boundary "
            "says of each tensor whether it is cut over the tensor group"
        )
    if "overlap_forward_backward" in given.get("pipeline", {}) and engine.global_rank == 0:
        log_rank_0(
            '"pipeline": {"overlap_forward_backward": ...} in the JSON has no effect: each stage runs one forward or '
            "backward at a time. Remove the key; losses and gradients stay the same"
        )
    if engine.asks_for_flops and engine.global_rank == 0:
        log_rank_0(
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


def make_reducer(engine: EngineParts, gradients: GradientSource | None) -> GradientReducer | None:
    """Return the sums over replicas; None with one replica, or for an engine that only evaluates."""
    if gradients is None or engine.grid.data_parallel_size == 1:
        return None
    module = engine.module
    own = getattr(module, "parameters_of", lambda _: list(module.parameters()))
    chunks = [[p for p in own(chunk) if not is_reduced_apart(p)] for chunk in range(num_chunks(module))]
    every = [p for p in module.parameters() if not is_reduced_apart(p)]
    tied = [weight for weight, group in module.get_tied_weights_and_groups() if dist.get_world_size(group) > 1]
    replicas, place = engine.grid.data_parallel_size, torch.device(engine.device)
    numbers = bucket_numbers(place, replicas, reduce_bucket_size(engine.config_given))
    order = ChunkOrder(every, chunks, tied, numbers=numbers)
    follow = getattr(gradients, "follow", None)  # a source of a program's own may lack it
    scatter = None if follow is None or engine.sums_dtype is not None else follow(order)
    return GradientReducer(
        order,
        gradients.of,
        engine.grid.get_data_parallel_group(),
        dtype=engine.sums_dtype,
        starts_early=overlaps_reduction(engine.pipeline_section),
        scatter=scatter,
    )


def make_stage(engine: EngineParts) -> Stage:
    """Return this rank's stage with its messages. Collective over all ranks."""
    grid = engine.grid
    cut = Slice()
    if grid.model_parallel_size > 1:
        group = grid.get_slice_parallel_group()
        cut = Slice(grid.get_slice_parallel_rank(), grid.model_parallel_size, group)
    device = torch.device(engine.device)
    ranks = [grid.stage_to_global(stage) for stage in range(engine.num_stages)]
    placement = placement_of(engine.module, engine.num_stages)
    limit = wait_limit(engine.pipeline_section, default_timeout())
    ctas = max_ctas(engine.pipeline_section)
    groups, must_open = process_groups.message_groups(grid, device, placement, limit, ctas)
    if must_open:
        process_groups.open_channels(groups, ranks, engine.stage_id, device, placement)
    links = StageLinks(engine.stage_id, ranks, groups, cut, device, limit, are_own=must_open)
    exchange = P2PCommunicator(links, engine.module, placement=placement, is_dynamic=engine.module.dynamic_shape)
    return Stage(engine.module, exchange, device, splits_by_graph(engine.pipeline_section, engine.module))


def make_data_agreement(engine: EngineParts, links: StageLinks, compares: bool) -> DataConsistency | None:
    """Return how all ranks agree on their data, over the host; None for one rank, which needs no other. Collective."""
    if dist.get_world_size() == 1:
        return None
    grid, group = engine.grid, engine.module.world_group
    if not torch_api.sends_from_host(group):
        headers = [each for (kind, *_), each in links.groups.items() if kind is Kind.HEADER]
        group = headers[0] if headers else dist.new_group(backend="gloo", timeout=links.timeout)
    return DataConsistency(
        group,
        stage=engine.stage_id,
        replica=grid.get_data_parallel_rank(),
        device=torch.device("cpu"),
        name_of=lambda rank: watchdog.name_of(rank, place_of(grid, rank)),
        compares=compares,
    )


def make_plan(engine: EngineParts) -> SchedulePlan:
    """Return the schedule that the JSON asks for; that which "auto" starts with."""
    chosen = chosen_schedule(engine.pipeline_section, engine.module)
    placement = placement_of(engine.module, engine.num_stages)
    if (auto := auto_schedule.asked_for(chosen)) is not None:
        chosen = auto_schedule.trials(auto_schedule.choices(auto, placement), placement)[0]
    size = group_size(engine.pipeline_section, placement)
    return SchedulePlan(chosen, placement=placement, stage=engine.stage_id, group_size=size)


def num_chunks(module: Any) -> int:
    """Return how many chunks of layers each stage of ``module`` has; DeepSpeed's own modules have one."""
    return getattr(module, "chunks", 1)


def placement_of(module: Any, num_stages: int) -> Placement:
    """Return how the pieces of ``module`` lie on the stages."""
    return Placement(num_stages, num_chunks(module), getattr(module, "placement", LOOP))
