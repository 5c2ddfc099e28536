"""Save a checkpoint: write shards to a temporary folder, write one manifest, commit by renaming the folder.

1. Every rank reports its tensors. Rank 0 checks that each global tensor is written exactly once and that the disk has
   enough space, and creates the temporary folder.
2. Every rank writes its file, flushes it, and reports its size and checksum.
3. Rank 0 writes the manifest, flushes the file and the folder, and renames the folder. The rename is the commit.

``torch.distributed.checkpoint`` (DCP) runs these steps with this project's planner and writer. An error on any
rank before the commit is raised on all ranks and leaves older checkpoints unchanged. An error after the commit (writing
the ``latest`` hint, deleting old checkpoints) is logged as a warning.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron import log
from megatron.checkpoint import folders
from megatron.checkpoint.retention import KEEP_ALL, RetentionPolicy, remove_old
from megatron.checkpoint.tensor_record import TensorRecord
from megatron.errors import CheckpointError, marked
from megatron.mpu.groups import Group


@dataclass(frozen=True)
class CapturedState:
    """Training state at one step, ready to be saved.

    Args:
        records: this rank's tensors; a tensor held by several ranks is written by its owner.
        metadata: JSON-serializable values (tuples are loaded as lists); only rank 0's are written.
    """

    step: int
    records: list[TensorRecord]
    metadata: dict[str, Any]


class SyncSaver:
    """Saves checkpoints synchronously. ``AsyncSaver.save`` takes the same arguments and returns earlier."""

    def __init__(self, world: Group) -> None:
        self._world = world

    def save(self, root: Path, captured: CapturedState, retention: RetentionPolicy = KEEP_ALL) -> Path:
        """Write ``root/step-00000020``, commit it, delete old checkpoints, and return its path. Collective.

        Raises:
            CheckpointError: any rank failed; raised on all ranks. The checkpoints in ``root`` are unchanged.
        """
        return write_checkpoint(
            root, captured.step, lambda: captured.records, captured.metadata, self._world, retention
        )


def save(
    root: Path,
    step: int,
    records: list[TensorRecord],
    metadata: dict[str, Any],
    world: Group,
    retention: RetentionPolicy = KEEP_ALL,
) -> Path:
    """Write the checkpoint ``root/step-00000020`` and return its path. Collective over ``world``.

    Args:
        records, metadata: as in ``CapturedState``.

    Raises:
        CheckpointError: any rank failed; raised on all ranks. The checkpoints in ``root`` are unchanged.
    """
    return write_checkpoint(root, step, lambda: records, metadata, world, retention)


@marked(is_of_this_rank=False)
def write_checkpoint(
    root: Path,
    step: int,
    get_records: Callable[[], list[TensorRecord]],
    metadata: dict[str, Any],
    world: Group,
    retention: RetentionPolicy,
) -> Path:
    """Write and commit one checkpoint, then delete old ones. Collective.

    An exception raised by ``get_records`` on any rank fails the save on all ranks.
    """
    from megatron.checkpoint import (
        dcp,  # importing it takes 0.6 s; deferred to the first save
        dcp_save,
    )

    root = Path(root)
    writer = dcp_save.ShardWriter(root, step, metadata if world.rank == 0 else {}, world.rank)
    try:
        path = dcp.save(writer, dcp_save.RecordSavePlanner(get_records), world)
    except CheckpointError as error:
        details = world.broadcast_object(writer.abandon(str(error)) if world.rank == 0 else "")
        raise CheckpointError(f"the checkpoint of step {step} was not saved to {root}: {error}{details}") from error
    if world.rank == 0:
        _clean_up(root, path, retention)
    return path


def _clean_up(root: Path, path: Path, retention: RetentionPolicy) -> None:
    """Update the ``latest`` hint and delete old checkpoints; errors are only logged, since the save has succeeded."""
    folders.write_latest(root, path)
    try:
        remove_old(folders.list_checkpoints(root), retention)
    except OSError as error:
        log.warning(f"old checkpoints in {root} could not be deleted ({error}); {path} is complete")
