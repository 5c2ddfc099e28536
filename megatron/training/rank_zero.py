"""What rank 0 alone may do, and all ranks must know of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from megatron.errors import CheckpointError, ConfigError
from megatron.training.world import World

Given = TypeVar("Given")


def by_rank_0(world: World, do: Callable[[], Given]) -> Given:
    """Return on every rank what ``do()`` gives on rank 0. Collective.

    Raises:
        CheckpointError, ConfigError: of ``do``, on all ranks alike.
    """
    box: list[Any] = [None]
    if world.rank == 0:
        try:
            box[0] = do()
        except (CheckpointError, ConfigError) as error:
            error.is_of_this_rank = False
            box[0] = error
    if world.grid.host.size > 1:
        dist.broadcast_object_list(box, src=0, group=world.grid.host.handle)
    if isinstance(box[0], Exception):
        raise box[0]
    given: Given = box[0]
    return given
