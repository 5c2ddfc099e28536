"""The start of a dump: its folder and each rank's file are there, and it is known what the dump will hold."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from megatron.config import Config
from megatron.debug.folder import Writer, write_manifest
from megatron.errors import ConfigError
from megatron.training.rank_zero import by_rank_0
from megatron.training.world import World

MOST_NAMES = 8


def open_dump(config: Config, world: World, modules: Sequence[str], parameters: Sequence[str]) -> Writer:
    """Return the writer of this rank, whose file is there. Collective.

    Args:
        modules, parameters: names of this rank's.

    Raises:
        ConfigError: a rank cannot write to the folder, it holds the dump of another run, or no name is asked for; the
            same on every rank.
    """
    _check_pattern(config.debug.wanted(), world, modules, parameters)
    folder = Path(str(config.debug.debug_dump))

    def make() -> None:
        try:
            write_manifest(folder, _facts(config, world))
        except (ValueError, OSError) as error:
            raise ConfigError(f"--debug-dump must name a folder for a new dump: {error}. Take another") from error

    by_rank_0(world, make)
    writer = Writer(folder, world.rank, with_tensors=config.debug.debug_dump_tensors)
    problem = ""
    try:
        writer.make()
    except OSError as error:
        problem = f"{world.name}: {error}"
    if problems := [each for each in world.grid.host.gather_objects(problem) if each]:
        raise ConfigError(f"--debug-dump must name a folder that every rank can write to, got {'; '.join(problems)}")
    return writer


def _check_pattern(pattern: re.Pattern[str], world: World, modules: Sequence[str], parameters: Sequence[str]) -> None:
    is_known = any(map(pattern.search, (*modules, *parameters)))
    if not any(world.grid.host.gather_objects(is_known)):
        raise ConfigError(
            f"--debug-dump-modules must match a module or parameter, got {pattern.pattern!r}, which matches none of "
            f"{', '.join(modules[:MOST_NAMES])}, ... of {world.name}"
        )


def _facts(config: Config, world: World) -> dict[str, Any]:
    """Return what a reader must know of the run."""
    grid = world.grid
    places = [grid.topology.coordinate(rank) for rank in range(grid.topology.world_size)]
    return {
        "family": config.family,
        "layout": {"tensor": grid.tensor.size, "pipe": grid.pipe.size, "data": grid.data.size},
        "world_size": len(places),
        "ranks": [{"stage": place.pipe, "tensor": place.tensor, "data": place.data} for place in places],
        "micro_batch_size": config.batch.batch_size,
        "dtype": config.precision.dtype,
        "device": world.kind,
        "schedule": config.parallel.schedule if config.parallel.has_pipeline else None,
        "seed": config.run.seed,
        "torch": torch.__version__,
    }
