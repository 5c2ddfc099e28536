"""How long a rank waits for another: as long as the default process group says, in every group of a pipeline.

DeepSpeed makes its groups without a timeout, so they would wait for the backend's 10 or 30 minutes.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from deepspeed.utils import groups as _deepspeed_groups
from torch.distributed import distributed_c10d

GRID_GROUPS = ("ds_model_proc_group", "dp_proc_group", "pp_proc_group", "slice_proc_group")


def default_timeout() -> timedelta | None:
    """Return the timeout of the default process group; None if its backend has none."""
    world = distributed_c10d._get_default_group()
    options = getattr(world._get_backend(world._device_types[0]), "options", None)
    return getattr(options, "_timeout", None)


def limit_waits(module: Any) -> None:
    """Give every group that DeepSpeed made for ``module`` the timeout of the default group."""
    timeout = default_timeout()
    if timeout is None:
        return
    for group in groups_of(module):
        distributed_c10d._set_pg_timeout(timeout, group)


def groups_of(module: Any) -> Iterator[Any]:
    """Yield the process groups of a pipeline module, its grid and DeepSpeed's engine that this rank is in."""
    made = [module.world_group, *(getattr(module._grid, name, None) for name in GRID_GROUPS)]
    made += [tie["group"] for tie in getattr(module, "tied_comms", {}).values()]
    made.append(_deepspeed_groups._WORLD_GROUP)
    for group in made:
        if isinstance(group, dist.ProcessGroup):
            yield group
