"""Run a function on rank 0 and share the result or error with all ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from megatron.errors import CheckpointError, ConfigError
from megatron.training.world import World

ResultT = TypeVar("ResultT")


def run_on_rank_0(world: World, fn: Callable[[], ResultT]) -> ResultT:
    """Call ``fn()`` on rank 0 and return the result on every rank. Collective.

    Raises:
        CheckpointError, ConfigError: raised by ``fn`` on rank 0; raised on all ranks.
    """
    result: Any = None
    if world.rank == 0:
        try:
            result = fn()
        except (CheckpointError, ConfigError) as error:
            error.is_of_this_rank = False
            result = error
    result = world.grid.host.broadcast_object(result)
    if isinstance(result, Exception):
        raise result
    return result
