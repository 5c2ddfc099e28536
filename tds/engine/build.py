"""The "pipeline" section of the JSON and what the engine makes of it once: stage, schedule, gradients, reducer."""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from tds import torch_api
from tds.deepspeed_api import checkpointing, choose_recomputed, layer_specs, place_of
from tds.engine import auto_schedule
from tds.engine.engine_parts import EngineParts
from tds.engine.micro_batches import DataConsistency
from tds.engine.optimizers import gradients_of
from tds.engine.recompute import is_deepspeeds_reentrant
from tds.engine.stage import SchedulePlan, Stage
from tds.gradient_reducer import ChunkOrder, GradientReducer
from tds.gradients import GradientSource, bucket_numbers, is_reduced_apart
from tds.log import log_rank_0
from tds.module import PipelineModule
from tds.p2p import process_groups
from tds.p2p.communicator import P2PCommunicator, StageLinks
from tds.p2p.packed_layout import Slice
from tds.schedule import LOOP, FileSchedule, Kind, Placement, read_schedule
from tds.shared_layers import sharing_layers
from tds.torch_api import default_timeout
from tds.watchdog import watchdog

# The "pipeline" section of DeepSpeed's JSON: its keys, and what they ask for.

KEYS = (
    "stages", "partition", "seed_layers", "activation_checkpoint_interval", "pipe_partitioned", "grad_partitioned",
    "use_reentrant", "schedule", "schedule_file", "chunks", "placement", "micro_batch_group_size", "trace",
    "trace_steps", "timeout_s", "check_data", "overlap_reduction", "p2p_max_ctas", "backward_split",
    "overlap_forward_backward",
)  # fmt: skip
"""DeepSpeed 0.19's, and ours: schedule, schedule_file, chunks, placement, micro_batch_group_size, trace,
trace_steps, timeout_s, check_data, overlap_reduction, p2p_max_ctas, backward_split. "overlap_forward_backward" was
removed: it is accepted, and ``log_unused_settings`` reports that it has no effect."""
BACKWARD_SPLITS = {"auto": None, "linear": False, "graph": True}

UNSUPPORTED = {
    "amp": 'use "bf16" or "fp16"',
    "progressive_layer_drop": "drop layers in your own modules, by torch's random numbers",
    "compression_training": "quantize or prune in your own layers, or after training",
    "eigenvalue": "take eigenvalues in the program, between steps",
}
"""Sections of the JSON that act in the forward and backward of DeepSpeed's own engine, and what to do without them."""


def check_keys(section: Mapping[str, Any]) -> None:
    """Raise ValueError for keys that nobody reads."""
    unknown = [key for key in section if key not in KEYS]
    if not unknown:
        return
    problems = []
    for key in unknown:
        close = difflib.get_close_matches(str(key), KEYS, n=1)
        problems.append(f'"{key}"' + (f' (did you mean "{close[0]}"?)' if close else ""))
    raise ValueError(f'"pipeline" in the JSON has no {", ".join(problems)}; its keys are {", ".join(KEYS)}')


def chosen_schedule(section: Mapping[str, Any], module: Any) -> Any:
    """Return the schedule that the section asks for: a name, a function (from a program's own dict, or that of a file),
    or None.

    Raises:
        ScheduleError: a file that holds no order, or one that cannot run.
        ValueError: chunks, a placement or an interleaved schedule that do not agree with the module.
    """
    has_chunks = isinstance(module, PipelineModule)
    chunks, placement = (module.chunks, module.placement) if has_chunks else (1, LOOP)
    asked, schedule = section.get("chunks", chunks), section.get("schedule")
    if not has_chunks and (asked != 1 or schedule == "interleaved"):
        raise ValueError(
            f"a stage of several chunks needs tds.PipelineModule(..., chunks=c), got a plain {type(module).__name__} "
            f'and "pipeline": {{"schedule": {schedule!r}, "chunks": {asked!r}}}. Build it with tds.PipelineModule.'
        )
    if asked != chunks:
        raise ValueError(
            f'"pipeline": {{"chunks": ...}} in the JSON must be the module\'s, got {asked!r} there and {chunks=} in '
            "PipelineModule. The layers are built before the JSON is read: change the module, or leave the key out."
        )
    if section.get("placement", placement) != placement:
        raise ValueError(
            f'"pipeline": {{"placement": ...}} in the JSON must be the module\'s, got {section["placement"]!r} there '
            f"and {placement!r} in PipelineModule. Build it with tds.PipelineModule(..., placement=...), or leave the "
            "key out."
        )
    if (path := section.get("schedule_file")) is not None:
        return _schedule_in(path, section)
    return schedule


def _schedule_in(path: Any, section: Mapping[str, Any]) -> FileSchedule:
    """Return the order of a file, which stands alone."""
    beside = [key for key in ("schedule", "micro_batch_group_size") if section.get(key)]
    if not isinstance(path, (str, os.PathLike)) or beside:
        raise ValueError(
            f'"pipeline": {{"schedule_file": ...}} must be the path of a file, and stand without "schedule" and '
            f'"micro_batch_group_size", got {path!r}' + (f" beside {', '.join(beside)}" if beside else "")
        )
    return read_schedule(os.fspath(path))


def accepted(given: dict[str, Any]) -> dict[str, Any]:
    """Return the JSON without the sections of ``UNSUPPORTED``, all of which must be switched off.

    DeepSpeed refuses some of them even so, since it has dropped what they are for.

    Raises:
        NotImplementedError: one of them is enabled.
    """
    for key, instead in UNSUPPORTED.items():
        if _is_enabled(given.get(key)):
            raise NotImplementedError(
                f'the pipeline engine of tds does not act on "{key}" in the JSON, got it enabled; {instead}, and take '
                "the section out"
            )
    return {key: value for key, value in given.items() if key not in UNSUPPORTED}


def _is_enabled(section: Any) -> bool:
    """Return whether ``section``, or a section within, says so."""
    if not isinstance(section, Mapping):
        return section is True
    return any(_is_enabled(value) for key, value in section.items() if key == "enabled" or isinstance(value, Mapping))


def splits_by_graph(section: Mapping[str, Any], module: Any) -> bool | None:
    """Return whether weights are put off by autograd's graph, too; None: where linear layers have less than half.

    Raises:
        ValueError: "backward_split" is none of BACKWARD_SPLITS.
    """
    asked = section.get("backward_split", "auto")
    if asked not in BACKWARD_SPLITS:
        raise ValueError(f'"pipeline": {{"backward_split": ...}} must be "auto", "linear" or "graph", got {asked!r}')
    recomputes = bool(getattr(module, "activation_checkpoint_interval", 0))  # by the graph it would do so twice
    return False if asked == "auto" and recomputes else BACKWARD_SPLITS[asked]


def wait_limit(section: Mapping[str, Any], default: timedelta | None) -> timedelta | None:
    """Return how long a stage waits for another.

    Raises:
        ValueError: "timeout_s" is no positive number.
    """
    limit = section.get("timeout_s")
    if limit is None:
        return default
    if isinstance(limit, bool) or not isinstance(limit, (int, float)) or not limit > 0:
        raise ValueError(f'"pipeline": {{"timeout_s": ...}} must be a positive number of seconds, got {limit!r}')
    return timedelta(seconds=limit)


def compares_data(section: Mapping[str, Any]) -> bool:
    """Return whether the ranks of a replica are to compare checksums of what they have read.

    Raises:
        ValueError: "check_data" is neither true nor false.
    """
    return _switch(section, "check_data", False)


def overlaps_reduction(section: Mapping[str, Any]) -> bool:
    """Return whether sums over replicas are to start while the backward runs.

    Raises:
        ValueError: "overlap_reduction" is neither true nor false.
    """
    return _switch(section, "overlap_reduction", True)


def max_ctas(section: Mapping[str, Any]) -> int:
    """Return how many processors of a GPU a message between stages may hold.

    Raises:
        ValueError: "p2p_max_ctas" is no whole number of 0 or more.
    """
    asked = section.get("p2p_max_ctas", process_groups.MAX_CTAS)
    if isinstance(asked, bool) or not isinstance(asked, int) or asked < 0:
        raise ValueError(
            f'"pipeline": {{"p2p_max_ctas": ...}} must be a whole number of 0 (as NCCL chooses) or more, got {asked!r}'
        )
    return asked


def group_size(section: Mapping[str, Any], placement: Placement) -> int:
    """Return how many micro-batches go through a chunk before the next one's turn; 0: as many as stages.

    Raises:
        ValueError: "micro_batch_group_size" is no whole number of the stages or more, or there is one chunk, or a V.
    """
    asked = section.get("micro_batch_group_size", 0)
    is_number = isinstance(asked, int) and not isinstance(asked, bool)
    if asked != 0 and not (is_number and asked >= placement.num_stages):
        raise ValueError(
            '"pipeline": {"micro_batch_group_size": ...} must be a whole number, as large as the stages are many, got '
            f"{asked!r} for {placement.num_stages} stages"
        )
    if asked and (placement.num_chunks == 1 or placement.kind != LOOP):
        raise ValueError(
            f'"pipeline": {{"micro_batch_group_size": {asked}}} needs several chunks on each stage, in a {LOOP}, got '
            f"{placement.num_chunks} in a {placement.kind}. Leave it out"
        )
    return int(asked)


def reduce_bucket_size(given: Mapping[str, Any]) -> int:
    """Return how many numbers "zero_optimization" of the JSON asks for in a bucket; 0 where it does not say."""
    section = given.get("zero_optimization")
    asked = section.get("reduce_bucket_size", 0) if isinstance(section, Mapping) else 0
    return int(asked) if isinstance(asked, (int, float)) else 0  # "auto" says nothing


def _switch(section: Mapping[str, Any], key: str, default: bool) -> bool:
    asked = section.get(key, default)
    if not isinstance(asked, bool):
        raise ValueError(f'"pipeline": {{"{key}": ...}} must be true or false, got {asked!r}')
    return asked


# What the engine builds once: its stage, its schedule, its view of the optimizer.


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
