"""``--pipeline-schedule auto``, ahead of the model: one chunk a stage, two in a loop or two in a V (no torch).

Layers cannot move while a run goes on, so this is decided by arithmetic: each schedule of each placement is simulated
with the estimated costs of its pieces, and those whose fullest stage would not fit into a device's memory are left out.
The run begins with the placement of the fastest; among the schedules for it that fit, the engine chooses by measured
times (``tds.engine.auto_schedule``). Where a flag says how layers lie, they lie so.
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
"""Chunks on each stage, and how they lie; of equally fast ones the first is taken."""
LYING = (
    "pipeline_chunks", "layers_per_chunk", "pipeline_placement", "pipeline_layout", "pipeline_schedule_file",
    "micro_batch_group_size", "pipeline_split_rank",
)  # fmt: skip
"""Fields of the flags that say how layers lie."""
MARGIN = 0.01
"""More chunks must be faster by this share: they send more messages."""
MEMORY_MARGIN = 0.10
"""By how much a plan of memory may be wrong; docs/planner.md has what was measured."""


@dataclass(frozen=True)
class Candidate:
    """A schedule on a placement.

    Args:
        time: of a step, in layers' forwards.
        most_bytes: of the fullest stage.
    """

    chunks: int
    placement: str
    schedule: str
    time: float
    most_bytes: int

    def __str__(self) -> str:
        is_twofold = self.chunks > 1 and self.schedule in ONE_CHUNK
        return f"{self.schedule} of {self.chunks} chunks" if is_twofold else self.schedule


def usable_bytes(kind: str, ranks_here: int) -> int:
    """Return the memory that a plan may fill, of a rank's device or of a host that so many ranks share.

    Args:
        kind: "cpu", "cuda" or that of a plug-in; the device must be there.
    """
    if kind == "cpu":
        found = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // ranks_here
    else:
        from megatron import device  # it imports torch, which a dry run on CPUs does without

        found = device.total_memory_bytes(kind) - device.memory_of_others(kind)
    return int(found * (1 - MEMORY_MARGIN))


def smallest_usable_bytes(world: World) -> int:
    """Return the least ``usable_bytes`` of all ranks. Collective."""
    import torch
    from torch.distributed import ReduceOp

    from megatron.mpu.mappings import all_reduce

    usable = usable_bytes(world.kind, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    value = torch.tensor([usable], dtype=torch.float64, device=world.device)
    return int(all_reduce(value, world.grid.world, ReduceOp.MIN).item())


def is_free(config: Config) -> bool:
    """Return whether the schedule is "auto" and nothing says how layers lie."""
    parallel = config.parallel
    is_said = any(name in config.given for name in LYING) or parallel.partition_method not in ("balanced", "profile")
    is_known = config.model.vocab_size is not None
    return parallel.has_pipeline and parallel.pipeline_schedule == AUTO and is_known and not is_said


def with_placement(config: Config, topology: Topology, dtype: str, limit: int | None) -> Config:
    """Return ``config`` with the placement to run by, the schedules that fit, and a note of why.

    Args:
        limit: bytes that a rank can have; the same on every rank. None: not known, and everything fits.
    """
    if not is_free(config):
        return config
    every = list(_candidates(config, topology, dtype))
    if not every:  # those that were named are for more micro-batches: chunks lie as they ask for
        return config
    fitting = [each for each in every if limit is None or each.most_bytes <= limit]
    if not fitting:
        least = min(every, key=lambda each: each.most_bytes)
        return _noted(_placed(config, least, [least]), f"{least}, which needs least; none fits", every, limit)
    chosen = min(fitting, key=lambda each: each.time * (1 + MARGIN * (each.chunks > 1)))
    names = [each for each in fitting if (each.chunks, each.placement) == (chosen.chunks, chosen.placement)]
    lie = f"{chosen.chunks} chunk{'s' * (chosen.chunks > 1)} on each stage{' in a V' * (chosen.placement == V)}"
    return _noted(_placed(config, chosen, names), lie, every, limit)


def _candidates(config: Config, topology: Topology, dtype: str) -> Iterator[Candidate]:
    """Yield every schedule of every placement that the run's checks take and that has micro-batches enough."""
    known = find_problems(config, topology.world_size)  # of an elastic job there may be some
    for chunks, placement in PLACEMENTS:
        if chunks > 1 and config.batch.gas < topology.pipe:
            continue
        for name in _allowed(config, chunks, placement):
            placed = _with(config, name, chunks, placement)
            if any(each not in known for each in find_problems(placed, topology.world_size)):
                continue
            bounds = registry.bounds_of(placed, topology.pipe)
            most = max(stage.total for stage in stage_memory(placed, topology, bounds, dtype))
            pieces = registry.costs_of(config).piece_costs(bounds)
            yield Candidate(chunks, placement, name, _step_time(placed, topology.pipe, name, pieces), most)


def _allowed(config: Config, chunks: int, placement: str) -> tuple[str, ...]:
    """Return the schedules for chunks that lie so; where --pipeline-auto-schedules names some, of these."""
    asked = config.parallel.auto_schedules
    return tuple(name for name in candidates(AUTO, chunks, placement) if not asked or name in asked)


def _step_time(config: Config, stages: int, name: str, pieces: list[float]) -> float:
    """Return what a step takes where B = W = F; on a CPU halves of a backward take longer than a whole one."""
    price = 1 + SPLIT_PRICE * is_on_cpu(config)
    again = 1.0 if config.parallel.checkpoint_activations else 0.0
    costs = Costs(
        forward=tuple(pieces),
        backward_input=tuple((again + price) * cost for cost in pieces),
        backward_weight=tuple(price * cost for cost in pieces),
        backward=tuple((again + 2) * cost for cost in pieces),
    )
    lie = config.parallel.chunks, config.parallel.placement
    order = schedule_named(name, *lie)
    return simulate([order(stages, config.batch.gas, stage) for stage in range(stages)], costs, *lie).step_s


def _with(config: Config, schedule: str, chunks: int, placement: str) -> Config:
    lie: dict[str, Any] = {"pipeline_schedule": schedule, "pipeline_chunks": chunks, "pipeline_placement": placement}
    return replace(config, parallel=replace(config.parallel, pipeline_auto_schedules=None, **lie))


def _placed(config: Config, chosen: Candidate, fitting: list[Candidate]) -> Config:
    names = tuple(each.schedule for each in fitting)
    is_all = names == candidates(AUTO, chosen.chunks, chosen.placement)
    placed = _with(config, AUTO, chosen.chunks, chosen.placement)
    among = None if is_all else ",".join(names)
    return replace(placed, parallel=replace(placed.parallel, pipeline_auto_schedules=among))


def _noted(config: Config, lie: str, every: list[Candidate], limit: int | None) -> Config:
    fastest = min(each.time for each in every)
    ranked = ", ".join(f"{each} {each.time / fastest:.3f}" for each in sorted(every, key=lambda each: each.time))
    note = f"--pipeline-schedule auto: {lie}; a step by simulation, over the fastest: {ranked}"
    large = [each for each in every if limit is not None and each.most_bytes > limit]
    if limit is not None and large:
        listed = ", ".join(f"{each} {human_bytes(each.most_bytes)}" for each in large)
        note += f"; not within {human_bytes(limit)} of memory: {listed}"
    return replace(config, notes=(*config.notes, note))
