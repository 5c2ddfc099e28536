"""Construction of the engine's parts: stage, schedule, gradient reducer, data agreement."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from tds import torch_api
from tds.bucket_reducer import BucketReducer, ChunkOrder
from tds.engine import auto_schedule
from tds.engine.data_consistency import DataConsistency
from tds.engine.grid import PipelineGrid
from tds.engine.pipeline_json import PipelineSettings
from tds.engine.recompute import Recompute
from tds.engine.schedule_plan import SchedulePlan
from tds.engine.stage import Stage
from tds.gradients import GradientSource, choose_bucket_numel, is_reduced_by_optimizer
from tds.micro_batch_reducer import MicroBatchOrder, MicroBatchReducer
from tds.p2p import process_groups
from tds.p2p.communicator import P2PCommunicator
from tds.p2p.packed_layout import TensorGroup
from tds.p2p.transport import StageLinks
from tds.schedule import LOOP, MessageType, Placement


def make_bucket_reducer(
    module: Any, grid: PipelineGrid, device: torch.device, gradients: GradientSource | None, settings: PipelineSettings
) -> BucketReducer | None:
    """Create the gradient reducer; None for a single replica or an engine that only evaluates."""
    if gradients is None or grid.data_parallel_size == 1:
        return None
    parameters_of = getattr(module, "parameters_of", lambda _: list(module.parameters()))
    reduction = getattr(gradients, "backward_reduction", None)  # optional in a program's own gradient source
    if reduction is not None:
        chunks = [parameters_of(chunk) for chunk in range(num_chunks(module))]
        micro_batch_order = MicroBatchOrder(
            module.parameters(), chunks, reduction, bucket_numel=settings.reduce_bucket_size or None
        )
        return MicroBatchReducer(micro_batch_order, reduction, starts_early=settings.overlaps_reduction)
    chunks = [
        [p for p in parameters_of(chunk) if not is_reduced_by_optimizer(p)] for chunk in range(num_chunks(module))
    ]
    parameters = [p for p in module.parameters() if not is_reduced_by_optimizer(p)]
    tied_weights = [weight for weight, group in module.get_tied_weights_and_groups() if dist.get_world_size(group) > 1]
    bucket_numel = choose_bucket_numel(device, grid.data_parallel_size, settings.reduce_bucket_size)
    order = ChunkOrder(parameters, chunks, tied_weights, bucket_numel=bucket_numel)
    use_buckets = getattr(gradients, "use_buckets", None)  # optional in a program's own gradient source
    scatter = None if use_buckets is None or settings.grad_reduce_dtype is not None else use_buckets(order)
    return BucketReducer(
        order,
        gradients.gradient_of,
        grid.get_data_parallel_group(),
        dtype=settings.grad_reduce_dtype,
        starts_early=settings.overlaps_reduction,
        scatter=scatter,
    )


def make_stage(
    module: Any, grid: PipelineGrid, device: torch.device, settings: PipelineSettings, recompute: Recompute
) -> Stage:
    """Create this rank's stage and its communicator. Collective over all ranks."""
    stage, num_stages = grid.get_stage_id(), grid.pipe_parallel_size
    tensor_group = TensorGroup()
    if grid.model_parallel_size > 1:
        group = grid.get_slice_parallel_group()
        tensor_group = TensorGroup(grid.get_slice_parallel_rank(), grid.model_parallel_size, group)
    ranks = [grid.stage_to_global(stage_id) for stage_id in range(num_stages)]
    placement = placement_of(module, num_stages)
    limit = settings.timeout
    groups, must_open = process_groups.message_groups(grid, device, placement, limit, settings.max_ctas)
    if must_open:
        process_groups.open_channels(groups, ranks, stage, device, placement)
    links = StageLinks(stage, ranks, groups, tensor_group, device, limit, are_dedicated=must_open)
    communicator = P2PCommunicator(
        links, module, placement=placement, is_dynamic=getattr(module, "dynamic_shape", False)
    )
    return Stage(module, communicator, device, settings.splits_by_graph, recompute)


def make_data_agreement(
    grid: PipelineGrid, links: StageLinks, world_group: Any, rank_names: Sequence[str], should_compare: bool
) -> DataConsistency | None:
    """Create the check that all ranks have data, which communicates on the host; None for a single rank. Collective."""
    if dist.get_world_size() == 1:
        return None
    group = world_group
    if not torch_api.sends_from_host(group):
        headers = [candidate for (msg_type, *_), candidate in links.groups.items() if msg_type is MessageType.HEADER]
        group = headers[0] if headers else dist.new_group(backend="gloo", timeout=links.timeout)
    return DataConsistency(
        group,
        stage=grid.get_stage_id(),
        replica=grid.get_data_parallel_rank(),
        device=torch.device("cpu"),
        name_of=lambda rank: rank_names[rank],
        should_compare=should_compare,
    )


def make_plan(module: Any, grid: PipelineGrid, settings: PipelineSettings) -> SchedulePlan:
    """Plan the schedule in ``settings``; for "auto", its first trial."""
    chosen, placement = settings.schedule, placement_of(module, grid.pipe_parallel_size)
    if (auto := auto_schedule.parse_auto(chosen)) is not None:
        chosen = auto_schedule.trial_schedules(auto_schedule.allowed_schedules(auto, placement), placement)[0]
    return SchedulePlan(chosen, placement=placement, stage=grid.get_stage_id(), group_size=settings.group_size)


def num_chunks(module: Any) -> int:
    """Return the number of layer chunks per stage; DeepSpeed's own modules have one."""
    return getattr(module, "chunks", 1)


def placement_of(module: Any, num_stages: int) -> Placement:
    """Return the placement of the chunks of ``module`` on the stages."""
    return Placement(num_stages, num_chunks(module), getattr(module, "placement", LOOP))
