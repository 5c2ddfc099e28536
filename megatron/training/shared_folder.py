"""Do all nodes see the folder that rank 0 has chosen? Found at the start, not at the first save."""

from __future__ import annotations

import os
import platform
import tempfile
from pathlib import Path

from megatron.checkpoint.visibility import Patience
from megatron.errors import ConfigError
from megatron.training.rank_zero import by_rank_0
from megatron.training.world import World


def check_shared(folder: Path, world: World) -> None:
    """Check that the first rank of each node sees a file that rank 0 leaves in ``folder``. Collective.

    On a network file system the file is waited for as long as those of a checkpoint are.

    Raises:
        ConfigError: a node does not see it; on all ranks alike.
    """
    host = world.grid.host
    if host.size == 1:
        return
    probe = by_rank_0(world, lambda: _leave_probe(folder))
    if world.local_rank == 0:
        Patience().wait_for(probe)
    is_blind = world.local_rank == 0 and not probe.exists()
    told = host.gather_objects(platform.node() if is_blind else None)
    by_rank_0(world, lambda: _judge(probe, sorted({name for name in told if name is not None})))


def _leave_probe(folder: Path) -> Path:
    try:
        descriptor, name = tempfile.mkstemp(prefix=".probe-", dir=folder)
    except OSError as error:
        raise ConfigError(f"--save must name a folder that can be written, got {folder}: {error}") from error
    os.close(descriptor)
    return Path(name)


def _judge(probe: Path, blind: list[str]) -> None:
    """Take the probe away; one that has gone already, with the leftovers of another start, proves nothing."""
    try:
        probe.unlink()
    except OSError:
        return
    if blind:
        raise ConfigError(
            f"--save must be a folder that all nodes share; node {', '.join(blind)} does not see what rank 0 writes to "
            f"{probe.parent} on {platform.node()}. Name a folder of a file system that all of them mount there"
        )
