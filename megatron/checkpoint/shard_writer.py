"""One checkpoint folder, as ``torch.distributed.checkpoint.save`` has it written.

| call | on | does |
|---|---|---|
| prepare_global_plan | rank 0 | checks the free space, makes the temporary folder |
| write_data | every rank | writes its file, flushes it, tells size and checksum |
| finish | rank 0 | writes the manifest, flushes file and folder, renames the folder: the commit |
| abandon | rank 0 | after an error on any rank: removes the temporary folder |
"""

from __future__ import annotations

import errno
import json
import math
import os
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from megatron import files
from megatron.checkpoint import folders, manifest, shard_file
from megatron.checkpoint.causes import in_words
from megatron.checkpoint.manifest import FileFacts, Manifest
from megatron.checkpoint.visibility import Patience
from megatron.errors import CheckpointError
from megatron.log import human_bytes

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
_MANIFEST_BYTES_PER_TENSOR = 400  # generous; for the check of the free space only
_told_bytes = partial(human_bytes, units=("B", "kB", "MB", "GB"), digits=1)


class ShardWriter(StorageWriter):
    """Writes the checkpoint of ``step`` into ``root``; rank 0's ``state`` goes into the manifest."""

    def __init__(self, root: Path, step: int, state: dict[str, Any], rank: int) -> None:
        self._root, self._step, self._state, self._rank = root, step, state, rank
        self._temporary: Path | None = None  # on rank 0, once it may be there
        self._num_bytes = 0

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """DCP's hook; a writer writes one checkpoint."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return False: DCP never picks this writer by a path alone."""
        return False

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """DCP's hook; nothing to prepare."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Return the plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Check that the disk has room, make the temporary folder, and tell all ranks its name."""
        with in_words(is_of_this_rank=False):
            items = [item for plan in plans for item in plan.items]
            self._num_bytes = len(json.dumps(self._state)) + sum(
                _num_bytes(item) + _MANIFEST_BYTES_PER_TENSOR for item in items
            )
            files.make_folder(self._root)
            folders.remove_leftovers(self._root)
            free = files.free_bytes(self._root)
            if self._num_bytes > free:
                raise CheckpointError(
                    f"need {_told_bytes(self._num_bytes)}, free {_told_bytes(free)}. "
                    "Free some space, lower --keep-last or move --save."
                )
            self._temporary = folders.temporary_name(folders.free_name(self._root, self._step))
            files.make_folder(self._temporary)
            return [replace(plan, storage_data=self._temporary) for plan in plans]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's file, if it owns anything."""
        done: Future[list[WriteResult]] = Future()
        with in_words():
            tensors = {_key(item): cast(torch.Tensor, planner.resolve_data(item)) for item in plan.items}
            if not tensors:
                done.set_result([])
                return done
            name = shard_file.name_of(self._rank)
            Patience().wait_for(plan.storage_data)
            size, crc32 = shard_file.write(plan.storage_data / name, tensors)
            done.set_result([WriteResult(MetadataIndex(name), size, FileFacts(size, crc32))])
            return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the manifest and rename; DCP tells ``metadata`` to all ranks, with the path as ``checkpoint_id``."""
        with in_words(is_of_this_rank=False):
            assert self._temporary is not None  # DCP calls prepare_global_plan on this rank before
            facts = {result.index.fqn: result.storage_data for of_rank in results for result in of_rank}
            sequence = folders.last_sequence(folders.named(self._root)) + 1
            content = Manifest(sequence, self._step, self._state, facts, metadata.planner_data)
            files.write_bytes(self._temporary / manifest.NAME, manifest.to_bytes(content))
            files.sync_folder(self._temporary)
            target = folders.free_name(self._root, self._step)
            folders.commit(self._temporary, target)
            metadata.planner_data = None  # no other rank needs the index
            metadata.storage_meta = StorageMeta(checkpoint_id=target)

    def abandon(self, why: str) -> str:
        """Remove the temporary folder; return what was needed and is free or allowed, where that is ``why``."""
        if self._temporary is None:
            return ""
        with suppress(OSError):
            files.remove_tree(self._temporary)
        if f"[Errno {errno.EFBIG}]" in why:
            return f" (a file of it is {files.told_too_large()})"
        if not any(f"[Errno {number}]" in why for number in _NO_ROOM):
            return ""
        with suppress(OSError):
            free = _told_bytes(files.free_bytes(self._root))
            return f" (needed {_told_bytes(self._num_bytes)}, now free {free})"
        return ""


def _key(item: WriteItem) -> str:
    """Return the name of ``item`` in its file."""
    shape, start = item.tensor_data.chunk.sizes, item.index.offset  # type: ignore[union-attr]
    return shard_file.key_of(item.index.fqn, max(start or torch.Size([0]), default=0) if shape else 0)


def _num_bytes(item: WriteItem) -> int:
    data = item.tensor_data
    assert data is not None  # this project's planner makes items of tensors only
    return math.prod(data.chunk.sizes) * data.properties.dtype.itemsize
