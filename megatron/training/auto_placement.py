"""``--pipeline-schedule auto``: choose the placement of layers before the model is built. No torch.

The placements are one chunk per stage, two chunks in a loop, and two chunks in a V. Layers cannot move during a run, so
the choice is made by simulation: each schedule of each placement is simulated with the estimated costs of its virtual
stages, and schedules whose largest stage exceeds the device memory are excluded. The fastest one determines the
placement. The engine later selects one of the schedules that fit with this placement, by measured times
(``tds.engine.auto_schedule``). Flags that set the placement take precedence.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from megatron.arguments.validate import find_problems
from megatron.config import Config
from megatron.log import human_bytes
from megatron.models import registry
from megatron.mpu.topology import Topology
from megatron.training.estimates import is_on_cpu, stage_memory
from tds.schedule import LOOP, Costs, V, schedule_named, simulate
from tds.schedule.simulate import AUTO, ONE_CHUNK, SPLIT_OVERHEAD, candidate_schedules

if TYPE_CHECKING:
    from megatron.training.world import World

PLACEMENTS = ((1, LOOP), (2, LOOP), (2, V))
"""(chunks per stage, placement); the first of equally fast ones is chosen."""
PLACEMENT_FIELDS = (
    "pipeline_chunks", "layers_per_chunk", "pipeline_placement", "pipeline_layout", "pipeline_schedule_file",
    "micro_batch_group_size", "pipeline_split_rank",
)  # fmt: skip
"""Fields of the flags that set the placement of layers."""
MIN_GAIN = 0.01
"""More chunks must be faster by at least this fraction, because they send more messages."""
MEMORY_MARGIN = 0.10
"""Relative error of memory estimates to allow for; docs/planner.md has measurements."""


@dataclass(frozen=True)
class Candidate:
    """A schedule for a layer placement.

    Args:
        chunks: chunks per stage.
        step_time: simulated step time, in units of one layer's forward.
        peak_bytes: estimated memory on the largest stage, in bytes.
    """

    chunks: int
    placement: str
    schedule: str
    step_time: float
    peak_bytes: int

    def __str__(self) -> str:
        is_ambiguous = self.chunks > 1 and self.schedule in ONE_CHUNK
        return f"{self.schedule} with {self.chunks} chunks" if is_ambiguous else self.schedule


def usable_bytes(device_type: str, num_local_ranks: int) -> int:
    """Return the memory that a rank may use, in bytes: its device's memory, or on a CPU its share of host memory.

    Args:
        device_type: "cpu", "cuda" or a plug-in's type; the device must be available.
        num_local_ranks: ranks on this host.
    """
    if device_type == "cpu":
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // num_local_ranks
    else:
        from megatron import device  # imports torch, which a dry run on CPUs does not need

        total = device.total_memory_bytes(device_type) - device.memory_of_others(device_type)
    return int(total * (1 - MEMORY_MARGIN))


def min_usable_bytes(world: World) -> int:
    """Return the minimum of ``usable_bytes`` over all ranks. Collective."""
    import torch
    from torch.distributed import ReduceOp

    from megatron.mpu.mappings import all_reduce

    usable = usable_bytes(world.device_type, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    value = torch.tensor([usable], dtype=torch.float64, device=world.device)
    return int(all_reduce(value, world.grid.world, ReduceOp.MIN).item())


def should_choose_placement(config: Config) -> bool:
    """Return True if the schedule is "auto" and no flag sets the layer placement."""
    parallel = config.parallel
    is_set_by_flag = any(
        name in config.explicit_fields for name in PLACEMENT_FIELDS
    ) or parallel.partition_method not in (
        "balanced",
        "profile",
    )
    has_vocab_size = config.model.vocab_size is not None
    return parallel.has_pipeline and parallel.pipeline_schedule == AUTO and has_vocab_size and not is_set_by_flag


def with_placement(config: Config, topology: Topology, dtype: str, limit_bytes: int | None) -> Config:
    """Choose a placement; return ``config`` with it, the schedules that fit, and a note with the reason.

    Args:
        limit_bytes: memory limit per rank in bytes, the same on every rank; None: no limit.
    """
    if not should_choose_placement(config):
        return config
    all_candidates = list(_candidates(config, topology, dtype))
    if not all_candidates:  # --pipeline-auto-schedules names only schedules that need more micro-batches
        return config
    fitting = [candidate for candidate in all_candidates if limit_bytes is None or candidate.peak_bytes <= limit_bytes]
    if not fitting:
        smallest = min(all_candidates, key=lambda candidate: candidate.peak_bytes)
        return _with_note(
            _with_fitting_schedules(config, smallest, [smallest]),
            f"{smallest}, which needs the least memory; no schedule fits",
            all_candidates,
            limit_bytes,
        )
    best = min(fitting, key=lambda candidate: candidate.step_time * (1 + MIN_GAIN * (candidate.chunks > 1)))
    same_placement = [
        candidate for candidate in fitting if (candidate.chunks, candidate.placement) == (best.chunks, best.placement)
    ]
    placement_text = f"{best.chunks} chunk{'s' * (best.chunks > 1)} on each stage{' in a V' * (best.placement == V)}"
    return _with_note(
        _with_fitting_schedules(config, best, same_placement), placement_text, all_candidates, limit_bytes
    )


def _candidates(config: Config, topology: Topology, dtype: str) -> Iterator[Candidate]:
    """Yield every schedule of every placement that passes validation and has enough micro-batches."""
    # An elastic job may have problems that do not depend on the placement; they do not exclude candidates.
    existing_problems = find_problems(config, topology.world_size)
    for chunks, placement in PLACEMENTS:
        if chunks > 1 and config.batch.gas < topology.pipe:
            continue
        for schedule in _allowed_schedules(config, chunks, placement):
            placed_config = _with_schedule(config, schedule, chunks, placement)
            if any(problem not in existing_problems for problem in find_problems(placed_config, topology.world_size)):
                continue
            bounds = registry.bounds_of(placed_config, topology.pipe)
            peak_bytes = max(stage.total for stage in stage_memory(placed_config, topology, bounds, dtype))
            chunk_costs = registry.costs_of(config).chunk_costs(bounds)
            yield Candidate(
                chunks, placement, schedule, _step_time(placed_config, topology.pipe, schedule, chunk_costs), peak_bytes
            )


def _allowed_schedules(config: Config, chunks: int, placement: str) -> tuple[str, ...]:
    """Return the schedules for a placement, restricted to --pipeline-auto-schedules if given."""
    requested = config.parallel.auto_schedules
    return tuple(name for name in candidate_schedules(AUTO, chunks, placement) if not requested or name in requested)


def _step_time(config: Config, num_stages: int, schedule: str, chunk_costs: list[float]) -> float:
    """Simulate the step time, in units of one layer's forward.

    The backward passes for inputs and for weights are assumed to take as long as the forward pass. On a CPU, the split
    backward pass takes longer than an unsplit one.
    """
    split_factor = 1 + SPLIT_OVERHEAD * is_on_cpu(config)
    recompute = 1.0 if config.parallel.checkpoint_activations else 0.0
    costs = Costs(
        forward=tuple(chunk_costs),
        backward_input=tuple((recompute + split_factor) * cost for cost in chunk_costs),
        backward_weight=tuple(split_factor * cost for cost in chunk_costs),
        backward=tuple((recompute + 2) * cost for cost in chunk_costs),
    )
    layout = config.parallel.chunks, config.parallel.placement
    order = schedule_named(schedule, *layout)
    return simulate([order(num_stages, config.batch.gas, stage) for stage in range(num_stages)], costs, *layout).step_s


def _with_schedule(config: Config, schedule: str, chunks: int, placement: str) -> Config:
    settings: dict[str, Any] = {
        "pipeline_schedule": schedule,
        "pipeline_chunks": chunks,
        "pipeline_placement": placement,
    }
    return replace(config, parallel=replace(config.parallel, pipeline_auto_schedules=None, **settings))


def _with_fitting_schedules(config: Config, best: Candidate, fitting: list[Candidate]) -> Config:
    names = tuple(candidate.schedule for candidate in fitting)
    is_all = names == candidate_schedules(AUTO, best.chunks, best.placement)
    placed = _with_schedule(config, AUTO, best.chunks, best.placement)
    schedules = None if is_all else ",".join(names)
    return replace(placed, parallel=replace(placed.parallel, pipeline_auto_schedules=schedules))


def _with_note(config: Config, placement_text: str, all_candidates: list[Candidate], limit_bytes: int | None) -> Config:
    """Return ``config`` with a note that compares the candidates.

    Args:
        placement_text: text on the chosen placement.
        all_candidates: all candidates.
        limit_bytes: memory limit per rank in bytes; None: no limit.
    """
    fastest = min(candidate.step_time for candidate in all_candidates)
    ranked = ", ".join(
        f"{candidate} {candidate.step_time / fastest:.3f}"
        for candidate in sorted(all_candidates, key=lambda candidate: candidate.step_time)
    )
    note = f"--pipeline-schedule auto: {placement_text}; simulated step times relative to the fastest: {ranked}"
    too_large = [
        candidate for candidate in all_candidates if limit_bytes is not None and candidate.peak_bytes > limit_bytes
    ]
    if limit_bytes is not None and too_large:
        listed = ", ".join(f"{candidate} {human_bytes(candidate.peak_bytes)}" for candidate in too_large)
        note += f"; exceeds the memory limit of {human_bytes(limit_bytes)}: {listed}"
    return replace(config, notes=(*config.notes, note))
