"""What each rank measures of a log interval, known to all: times, and the most memory that it has held."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from megatron import device
from megatron.mpu.mappings import all_reduce
from megatron.mpu.topology import Topology
from megatron.training.compile_time import Compiled
from megatron.training.parts import Run
from megatron.training.world import World

MIB = 2**20


class OfRanks(NamedTuple):
    """One number of each rank, in seconds or bytes, and what was compiled there.

    ``waited_s`` for data since the last report, ``own_s`` of own work a step, ``waited_each_s`` for data a step.
    """

    waited_s: list[float]
    own_s: list[float]
    waited_each_s: list[float]
    memory_bytes: list[float]
    compiled: list[Compiled]


def gather(run: Run) -> OfRanks:
    """Return what all ranks have measured since the last call. Collective.

    Shapes:
        the message is [7, ranks]; memory goes in MiB, which fp32 holds in steps of 8 KiB at 80 GiB
    """
    waited = 0.0 if run.batches is None else run.batches.drain_waited_s()
    own_s, steps = run.engine.busy()
    held = device.peak_memory_bytes(run.world.kind) / MIB
    mine = [waited, own_s / max(steps, 1), waited / max(steps, 1), held, *run.compiling.drain()]
    told = torch.zeros(len(mine), run.world.grid.topology.world_size, dtype=torch.float32, device=run.world.device)
    told[:, run.world.rank] = torch.tensor(mine)
    waited_s, own_s, waited_each_s, memory, *compiled = all_reduce(told, run.world.grid.world).tolist()
    each_compiled = [
        Compiled(seconds, round(made), round(found)) for seconds, made, found in zip(*compiled, strict=True)
    ]
    return OfRanks(waited_s, own_s, waited_each_s, [MIB * each for each in memory], each_compiled)


def by_stage(values: Sequence[float], topology: Topology, join: Callable[[Sequence[float]], float]) -> dict[str, float]:
    """Return "stage 0" and so on with what ``join`` makes of the numbers of its ranks."""
    ranks = topology.groups("data", "tensor")
    return {f"stage {stage}": join([values[rank] for rank in each]) for stage, each in enumerate(ranks)}


def most_of_each_stage(number: float, world: World) -> dict[str, float]:
    """Return by stage the greatest of the bytes that each rank gives. Collective."""
    told = torch.zeros(world.grid.topology.world_size, dtype=torch.float32, device=world.device)
    told[world.rank] = number / MIB
    return by_stage([MIB * each for each in all_reduce(told, world.grid.world).tolist()], world.grid.topology, max)
