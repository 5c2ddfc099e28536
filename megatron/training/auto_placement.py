"""``--pipeline-schedule auto``: choose the placement of layers before the model is built. No torch.

The placements are one chunk per stage, two chunks in a loop, and two chunks in a V. Layers cannot move during a run, so
the choice is made by simulation: each schedule of each placement is simulated with the estimated costs of its pieces,
and schedules whose largest stage exceeds the device memory are excluded. The fastest one determines the placement.
The engine later selects one of the schedules that fit with this placement, by measured times
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
from tds.schedule.simulate import AUTO, ONE_CHUNK, SPLIT_PRICE, candidates

if TYPE_CHECKING:
    from megatron.training.world import World

PLACEMENTS = ((1, LOOP), (2, LOOP), (2, V))
"""(chunks per stage, placement); the first of equally fast ones is chosen."""
LYING = (
    "pipeline_chunks", "layers_per_chunk", "pipeline_placement", "pipeline_layout", "pipeline_schedule_file",
    "micro_batch_group_size", "pipeline_split_rank",
)  # fmt: skip
"""Fields of the flags that set the placement of layers."""
MARGIN = 0.01
"""More chunks must be faster by at least this fraction, because they send more messages."""
MEMORY_MARGIN = 0.10
"""Relative error of memory estimates to allow for; docs/planner.md has measurements."""


@dataclass(frozen=True)
class Candidate:
    """A schedule for a placement of the layers.

    Args:
        chunks: number of chunks per stage.
        time: simulated time of a step, in units of one layer's forward.
        most_bytes: estimated memory of the largest stage, in bytes.
    """

    chunks: int
    placement: str
    schedule: str
    time: float
    most_bytes: int

    def __str__(self) -> str:
        is_twofold = self.chunks > 1 and self.schedule in ONE_CHUNK
        return f"{self.schedule} with {self.chunks} chunks" if is_twofold else self.schedule


def usable_bytes(kind: str, ranks_here: int) -> int:
    """Return the memory that a rank may use, in bytes: the memory of its device, or on a CPU its share of the host's.

    Args:
        kind: device type: "cpu", "cuda" or a plug-in's; the device must be available.
        ranks_here: number of ranks on this host.
    """
    if kind == "cpu":
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // ranks_here
    else:
        from megatron import device  # imports torch, which a dry run on CPUs does not need

        total = device.total_memory_bytes(kind) - device.memory_of_others(kind)
    return int(total * (1 - MEMORY_MARGIN))


def smallest_usable_bytes(world: World) -> int:
    """Return the minimum of ``usable_bytes`` over all ranks. Collective."""
    import torch
    from torch.distributed import ReduceOp

    from megatron.mpu.mappings import all_reduce

    usable = usable_bytes(world.kind, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    value = torch.tensor([usable], dtype=torch.float64, device=world.device)
    return int(all_reduce(value, world.grid.world, ReduceOp.MIN).item())


def is_free(config: Config) -> bool:
    """Return True if the schedule is "auto" and no flag sets the placement of layers."""
    parallel = config.parallel
    is_set_by_flag = any(name in config.given for name in LYING) or parallel.partition_method not in (
        "balanced",
        "profile",
    )
    has_vocab_size = config.model.vocab_size is not None
    return parallel.has_pipeline and parallel.pipeline_schedule == AUTO and has_vocab_size and not is_set_by_flag


def with_placement(config: Config, topology: Topology, dtype: str, limit: int | None) -> Config:
    """Return ``config`` with the chosen placement, the schedules that fit, and a note with the reason.

    Args:
        limit: memory limit of a rank in bytes, the same on every rank; None: no limit.
    """
    if not is_free(config):
        return config
    all_candidates = list(_candidates(config, topology, dtype))
    if not all_candidates:  # --pipeline-auto-schedules names only schedules that need more micro-batches
        return config
    fitting = [each for each in all_candidates if limit is None or each.most_bytes <= limit]
    if not fitting:
        smallest = min(all_candidates, key=lambda each: each.most_bytes)
        return _noted(
            _placed(config, smallest, [smallest]),
            f"{smallest}, which needs the least memory; no schedule fits",
            all_candidates,
            limit,
        )
    chosen = min(fitting, key=lambda each: each.time * (1 + MARGIN * (each.chunks > 1)))
    same_placement = [each for each in fitting if (each.chunks, each.placement) == (chosen.chunks, chosen.placement)]
    text = f"{chosen.chunks} chunk{'s' * (chosen.chunks > 1)} on each stage{' in a V' * (chosen.placement == V)}"
    return _noted(_placed(config, chosen, same_placement), text, all_candidates, limit)


def _candidates(config: Config, topology: Topology, dtype: str) -> Iterator[Candidate]:
    """Yield every schedule of every placement that passes validation and has enough micro-batches."""
    # An elastic job may have problems that do not depend on the placement; they do not exclude candidates.
    known = find_problems(config, topology.world_size)
    for chunks, placement in PLACEMENTS:
        if chunks > 1 and config.batch.gas < topology.pipe:
            continue
        for name in _allowed(config, chunks, placement):
            placed = _with(config, name, chunks, placement)
            if any(problem not in known for problem in find_problems(placed, topology.world_size)):
                continue
            bounds = registry.bounds_of(placed, topology.pipe)
            most_bytes = max(stage.total for stage in stage_memory(placed, topology, bounds, dtype))
            pieces = registry.costs_of(config).piece_costs(bounds)
            yield Candidate(chunks, placement, name, _step_time(placed, topology.pipe, name, pieces), most_bytes)


def _allowed(config: Config, chunks: int, placement: str) -> tuple[str, ...]:
    """Return the schedules for a placement, restricted to --pipeline-auto-schedules if given."""
    requested = config.parallel.auto_schedules
    return tuple(name for name in candidates(AUTO, chunks, placement) if not requested or name in requested)


def _step_time(config: Config, stages: int, name: str, pieces: list[float]) -> float:
    """Return the simulated time of a step, in units of one layer's forward.

    The backward passes for inputs and for weights are assumed to take as long as the forward pass. On a CPU, the split
    backward pass takes longer than an unsplit one.
    """
    split_factor = 1 + SPLIT_PRICE * is_on_cpu(config)
    recompute = 1.0 if config.parallel.checkpoint_activations else 0.0
    costs = Costs(
        forward=tuple(pieces),
        backward_input=tuple((recompute + split_factor) * cost for cost in pieces),
        backward_weight=tuple(split_factor * cost for cost in pieces),
        backward=tuple((recompute + 2) * cost for cost in pieces),
    )
    layout = config.parallel.chunks, config.parallel.placement
    order = schedule_named(name, *layout)
    return simulate([order(stages, config.batch.gas, stage) for stage in range(stages)], costs, *layout).step_s


def _with(config: Config, schedule: str, chunks: int, placement: str) -> Config:
    """Return ``config`` with this schedule, number of chunks per stage, and placement."""
    settings: dict[str, Any] = {
        "pipeline_schedule": schedule,
        "pipeline_chunks": chunks,
        "pipeline_placement": placement,
    }
    return replace(config, parallel=replace(config.parallel, pipeline_auto_schedules=None, **settings))


def _placed(config: Config, chosen: Candidate, fitting: list[Candidate]) -> Config:
    """Return ``config`` with the placement of ``chosen`` and the schedules of ``fitting``."""
    names = tuple(candidate.schedule for candidate in fitting)
    is_all = names == candidates(AUTO, chosen.chunks, chosen.placement)
    placed = _with(config, AUTO, chosen.chunks, chosen.placement)
    schedules = None if is_all else ",".join(names)
    return replace(placed, parallel=replace(placed.parallel, pipeline_auto_schedules=schedules))


def _noted(config: Config, lie: str, every: list[Candidate], limit: int | None) -> Config:
    """Return ``config`` with a note that compares the candidates.

    Args:
        lie: text on the chosen placement.
        every: all candidates.
        limit: memory limit of a rank in bytes; None: no limit.
    """
    fastest = min(each.time for each in every)
    ranked = ", ".join(f"{each} {each.time / fastest:.3f}" for each in sorted(every, key=lambda each: each.time))
    note = f"--pipeline-schedule auto: {lie}; simulated step times relative to the fastest: {ranked}"
    too_large = [each for each in every if limit is not None and each.most_bytes > limit]
    if limit is not None and too_large:
        listed = ", ".join(f"{each} {human_bytes(each.most_bytes)}" for each in too_large)
        note += f"; exceeds the memory limit of {human_bytes(limit)}: {listed}"
    return replace(config, notes=(*config.notes, note))
