"""Check at the start that all nodes see the run folder."""

from __future__ import annotations

import os
import platform
import tempfile
from pathlib import Path

from megatron.checkpoint.file_visibility import FileVisibility
from megatron.errors import ConfigError
from megatron.training.rank_0 import run_on_rank_0
from megatron.training.world import World


def check_shared(folder: Path, world: World) -> None:
    """Check that the first rank on each node sees a file that rank 0 creates in ``folder``. Collective.

    On a network file system the ranks wait for the file as long as for checkpoint files.

    Raises:
        ConfigError: a node does not see the file; raised on all ranks.
    """
    host = world.grid.host
    if host.size == 1:
        return
    probe = run_on_rank_0(world, lambda: _create_probe(folder))
    if world.local_rank == 0:
        FileVisibility().wait_for(probe)
    is_probe_missing = world.local_rank == 0 and not probe.exists()
    hosts = host.gather_objects(platform.node() if is_probe_missing else None)
    run_on_rank_0(world, lambda: _check_probe(probe, sorted({name for name in hosts if name is not None})))


def _create_probe(folder: Path) -> Path:
    """Create an empty file in ``folder`` and return the path."""
    try:
        descriptor, name = tempfile.mkstemp(prefix=".probe-", dir=folder)
    except OSError as error:
        raise ConfigError(f"--save must name a writable folder, got {folder}: {error}") from error
    os.close(descriptor)
    return Path(name)


def _check_probe(probe: Path, blind_hosts: list[str]) -> None:
    """Delete the probe; raise if nodes did not see it, unless another start may have deleted it before."""
    try:
        probe.unlink()
    except OSError:
        return
    if blind_hosts:
        raise ConfigError(
            f"--save must name a folder that all nodes share, but node {', '.join(blind_hosts)} does not see the files "
            f"that rank 0 writes to {probe.parent} on {platform.node()}. Use a file system that all nodes mount at "
            "this path"
        )
