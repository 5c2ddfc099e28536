"""Save shards to a temporary folder, write one manifest, commit by one rename.

1. Every rank tells what it holds; rank 0 checks that each global tensor is written exactly once and that the disk
   has room, and makes the temporary folder.
2. Every rank writes its file, flushes it and tells its size and checksum.
3. Rank 0 writes the manifest, flushes file and folder, and renames the folder. That rename is the commit.

``torch.distributed.checkpoint`` (DCP) takes the ranks through these steps, with a planner and a writer of this
project. An error on any rank up to the commit is an error on all; older checkpoints are not touched. After it, what
is left (the hint, the removal of old ones) can only cost a warning.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron import log
from megatron.checkpoint import folders
from megatron.checkpoint.retention import RetentionPolicy, remove_old
from megatron.checkpoint.tensor_record import TensorRecord
from megatron.errors import CheckpointError, ConfigError, marked
from megatron.mpu.groups import Group


def save(
    root: Path,
    step: int,
    records: list[TensorRecord],
    state: dict[str, Any],
    world: Group,
    *,
    keep_last: int | None = None,
    keep_every: int | None = None,
    loaded: Path | None = None,
    keep_automatic: int | None = None,
    earlier: int = 0,
) -> Path:
    """Write the checkpoint ``root/step-00000020`` and return its path. Collective over ``world``.

    Args:
        records: the tensors that this rank holds. A name may be held by many ranks and is written by its owners.
        state: what JSON can hold (tuples come back as lists); rank 0's is written.
        keep_last: afterwards delete all but so many complete checkpoints (at least 1); None keeps all.
        keep_every: never delete one whose step is a multiple of this.
        loaded: the checkpoint that this run started from, which is never deleted.
        keep_automatic: without ``keep_last``: delete all but so many of those whose state says ``folders.AUTOMATIC``.
        earlier: never delete one of this sequence number or a lower one.

    Raises:
        CheckpointError: on all ranks alike, when any rank failed. The checkpoints in ``root`` are as they were.
        ConfigError: ``keep_last`` or ``keep_every`` is below 1.
    """
    check_keep(keep_last, keep_every)
    keep = RetentionPolicy(keep_last, keep_every, loaded, keep_automatic, earlier)
    return save_from(lambda: records, root, step, state, world, keep)


def check_keep(keep_last: int | None, keep_every: int | None) -> None:
    """Check that numbers of checkpoints to keep are such.

    Raises:
        ConfigError: one is below 1.
    """
    for flag, value in (("--keep-last", keep_last), ("--keep-every", keep_every)):
        if value is not None and value < 1:
            raise ConfigError(f"{flag} must be at least 1, got {value}")


@marked(is_of_this_rank=False)
def save_from(
    source: Callable[[], list[TensorRecord]],
    root: Path,
    step: int,
    state: dict[str, Any],
    world: Group,
    keep: RetentionPolicy,
) -> Path:
    """Do what ``save`` does with the records that ``source`` returns; one that raises fails the save. Collective."""
    from megatron.checkpoint import (
        dcp,  # 0.6 s, so not before the first save
        dcp_save,
    )

    root = Path(root)
    writer = dcp_save.ShardWriter(root, step, state if world.rank == 0 else {}, world.rank)
    try:
        path = dcp.save(writer, dcp_save.RecordSavePlanner(source), world)
    except CheckpointError as error:
        left = world.broadcast_object(writer.abandon(str(error)) if world.rank == 0 else "")
        raise CheckpointError(f"the checkpoint of step {step} was not saved to {root}: {error}{left}") from error
    if world.rank == 0:
        _clean_up(root, path, keep)
    return path


def _clean_up(root: Path, path: Path, keep: RetentionPolicy) -> None:
    """Point the hint at ``path`` and delete old checkpoints: the save has succeeded whatever happens here."""
    folders.write_latest(root, path)
    try:
        remove_old(folders.list_checkpoints(root), keep)
    except OSError as error:
        log.warning(f"old checkpoints in {root} could not be deleted ({error}); {path} is complete")
