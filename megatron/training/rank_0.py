"""Run a function on rank 0 and share its result or error with all ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from megatron.errors import CheckpointError, ConfigError
from megatron.training.world import World

Given = TypeVar("Given")


def run_on_rank_0(world: World, do: Callable[[], Given]) -> Given:
    """Return on every rank what ``do()`` gives on rank 0. Collective.

    Raises:
        CheckpointError, ConfigError: of ``do``, on all ranks alike.
    """
    given: Any = None
    if world.rank == 0:
        try:
            given = do()
        except (CheckpointError, ConfigError) as error:
            error.is_of_this_rank = False
            given = error
    given = world.grid.host.broadcast_object(given)
    if isinstance(given, Exception):
        raise given
    return given
