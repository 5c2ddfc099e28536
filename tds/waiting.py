"""How long a rank waits for another, in every group of a pipeline: what the JSON or the default process group says.

DeepSpeed makes its groups without a timeout, so they would wait for the backend's 10 or 30 minutes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from tds.compatibility import theirs

NCCL_GRACE = timedelta(seconds=2)
"""NCCL's own watchdog aborts the process without a word of ours, so it comes after the one in ``tds.watchdog``."""
GRID_GROUPS = ("ds_model_proc_group", "dp_proc_group", "pp_proc_group", "slice_proc_group")


def default_timeout() -> timedelta | None:
    """Return the timeout of the default process group; None if its backend has none."""
    world = distributed_c10d._get_default_group()
    options = getattr(world._get_backend(world._device_types[0]), "options", None)
    return getattr(options, "_timeout", None)


def limit_waits(module: Any, limit: timedelta | None = None, more: Iterable[Any] = ()) -> None:
    """Give every group that DeepSpeed made for ``module``, and ``more``, the time limit: by default that of the
    default group."""
    limit = default_timeout() if limit is None else limit
    if limit is None:
        return
    limit_groups({*groups_of(module), *more}, limit)


def limit_groups(groups: Iterable[Any], limit: timedelta) -> None:
    """Let the operations that ``groups`` start from now on end after ``limit``; sends and receives over gloo do not."""
    for group in groups:
        grace = NCCL_GRACE if dist.get_backend(group) == "nccl" else timedelta()
        distributed_c10d._set_pg_timeout(limit + grace, group)


def groups_of(module: Any) -> Iterator[Any]:
    """Yield the process groups of a pipeline module, its grid and DeepSpeed's engine that this rank is in."""
    made = [module.world_group, *(getattr(module._grid, name, None) for name in GRID_GROUPS)]
    made += [tie["group"] for tie in getattr(module, "tied_comms", {}).values()]
    made.append(theirs("deepspeed.utils.groups")._WORLD_GROUP)
    for group in made:
        if isinstance(group, dist.ProcessGroup):
            yield group
