"""Storage writer and planner for ``torch.distributed.checkpoint.save``.

| call | on | does |
|---|---|---|
| prepare_global_plan | rank 0 | checks the free space, makes the temporary folder; all ranks get its name |
| write_data | every rank | writes its file, flushes it, tells size and checksum |
| finish | rank 0 | writes the manifest, flushes file and folder, renames the folder: the commit |
| abandon | rank 0 | after an error on any rank: removes the temporary folder |

DCP's own check of a plan logs only which tensor is wrong; ``RecordSavePlanner`` names it in the error. Write items stay
on their rank: rank 0 receives the claims of each rank as plain values, because reading DCP's items of thousands of
ranks takes minutes.
"""

from __future__ import annotations

import errno
import json
import math
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from megatron import files
from megatron.checkpoint import folders, shard_file
from megatron.checkpoint.file_visibility import FileVisibility
from megatron.checkpoint.metadata import MANIFEST_NAME, Entry, FileFacts, Manifest, Piece, manifest_to_bytes
from megatron.checkpoint.rank_errors import in_words
from megatron.checkpoint.tensor_record import (
    Claim,
    TensorRecord,
    claim,
    is_empty,
    offsets,
    owned,
    part_shape,
    tiling_problem,
)
from megatron.errors import CheckpointError
from megatron.log import human_bytes

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
_MANIFEST_BYTES_PER_TENSOR = 400  # generous; for the check of the free space only
_format_bytes = partial(human_bytes, units=("B", "kB", "MB", "GB"), digits=1)


class ShardWriter(StorageWriter):
    """Writes the checkpoint of ``step`` into ``root``; rank 0's ``metadata`` is stored in the manifest."""

    def __init__(self, root: Path, step: int, metadata: dict[str, Any], rank: int) -> None:
        self._root, self._step, self._metadata, self._rank = root, step, metadata, rank
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
            self._num_bytes = len(json.dumps(self._metadata)) + sum(plan.planner_data for plan in plans)
            files.make_folder(self._root)
            folders.remove_stale(self._root)
            free = files.free_bytes(self._root)
            if self._num_bytes > free:
                raise CheckpointError(
                    f"need {_format_bytes(self._num_bytes)}, free {_format_bytes(free)}. "
                    "Free some space, lower --keep-last or move --save."
                )
            self._temporary = folders.temporary_name(folders.free_name(self._root, self._step))
            files.make_folder(self._temporary)
            return [replace(plan, storage_data=self._temporary, planner_data=None) for plan in plans]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's file, if it owns anything."""
        done: Future[list[WriteResult]] = Future()
        with in_words():
            tensors = {_key(item): cast(torch.Tensor, planner.resolve_data(item)) for item in plan.items}
            if not tensors:
                done.set_result([])
                return done
            name = shard_file.shard_file_name(self._rank)
            FileVisibility().wait_for(plan.storage_data)
            size, crc32 = shard_file.write_shard_file(plan.storage_data / name, tensors)
            done.set_result([WriteResult(MetadataIndex(name), size, FileFacts(size, crc32))])
            return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the manifest and rename; DCP tells ``metadata`` to all ranks, with the path as ``checkpoint_id``."""
        with in_words(is_of_this_rank=False):
            assert self._temporary is not None  # DCP calls prepare_global_plan on this rank before
            facts = {result.index.fqn: result.storage_data for of_rank in results for result in of_rank}
            sequence = folders.last_sequence(folders.list_checkpoints(self._root)) + 1
            content = Manifest(sequence, self._step, self._metadata, facts, metadata.planner_data)
            files.write_bytes(self._temporary / MANIFEST_NAME, manifest_to_bytes(content))
            files.sync_folder(self._temporary)
            target = folders.free_name(self._root, self._step)
            folders.commit_checkpoint(self._temporary, target)
            metadata.planner_data = None  # no other rank needs the index
            metadata.storage_meta = StorageMeta(checkpoint_id=target)

    def abandon(self, why: str) -> str:
        """Remove the temporary folder; return what was needed and is free or allowed, where that is ``why``."""
        if self._temporary is None:
            return ""
        with suppress(OSError):
            files.remove_tree(self._temporary)
        if f"[Errno {errno.EFBIG}]" in why:
            return f" (a file of it is {files.too_large_message()})"
        if not any(f"[Errno {number}]" in why for number in _NO_ROOM):
            return ""
        with suppress(OSError):
            free = _format_bytes(files.free_bytes(self._root))
            return f" (needed {_format_bytes(self._num_bytes)}, now free {free})"
        return ""


def _key(item: WriteItem) -> str:
    """Return the name of ``item`` in its file."""
    shape, start = item.tensor_data.chunk.sizes, item.index.offset  # type: ignore[union-attr]
    return shard_file.key_of(item.index.fqn, max(start or torch.Size([0]), default=0) if shape else 0)


def _num_bytes(item: WriteItem) -> int:
    data = item.tensor_data
    assert data is not None  # this project's planner makes items of tensors only
    return math.prod(data.chunk.sizes) * data.properties.dtype.itemsize


class RecordSavePlanner(SavePlanner):
    """Plans the save of TensorRecords; ``source`` is asked for them once."""

    def __init__(self, source: Callable[[], list[TensorRecord]]) -> None:
        self._source = source
        self._tensors: dict[MetadataIndex, torch.Tensor] = {}
        self._items: list[WriteItem] = []

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        """DCP's hook; the records come from ``source``, since a state dict has no place for their shards."""

    def create_local_plan(self) -> SavePlan:
        """Return as planner data what this rank holds, and the bytes that it writes."""
        with in_words():
            records = self._source()
            claims = [claim(record) for record in records]
            mine = list(owned(records).values())
            self._items = [_item(record) for record in mine]
            self._tensors = {item.index: record.tensor for item, record in zip(self._items, mine, strict=True)}
            num_bytes = sum(_num_bytes(item) + _MANIFEST_BYTES_PER_TENSOR for item in self._items)
            return SavePlan([], planner_data=([one.packed() for one in claims], num_bytes))

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Check what all ranks hold; the index of the manifest is the planner data of what comes back.

        The plans keep the bytes, for the writer's check of the free space.
        """
        with in_words(is_of_this_rank=False):
            index = global_index([[Claim.unpacked(*one) for one in plan.planner_data[0]] for plan in all_plans])
            plans = [replace(plan, planner_data=plan.planner_data[1]) for plan in all_plans]
            return plans, Metadata({}, planner_data=index)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """Return what this rank writes, where rank 0 says."""
        return replace(new_plan, items=self._items)

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor:
        """Return the tensor where it lies: whoever writes it copies it to the host when its turn comes."""
        return self._tensors[write_item.index]


def _item(record: TensorRecord) -> WriteItem:
    shard = record.shard
    chunk = ChunkStorageMetadata(torch.Size(offsets(shard)), torch.Size(part_shape(shard)))
    data = TensorWriteData(chunk, TensorProperties(record.tensor.dtype), torch.Size(shard.global_shape))
    return WriteItem(MetadataIndex(record.name, chunk.offsets), WriteItemType.SHARD, tensor_data=data)


def global_index(claims_of_ranks: list[list[Claim]]) -> dict[str, Entry]:
    """Return the entry of each global tensor.

    Raises:
        CheckpointError: ranks disagree on a tensor, or it is not written exactly once; all such tensors are named.
    """
    held: dict[str, list[tuple[int, Claim]]] = {}
    for rank, claims in enumerate(claims_of_ranks):
        for one in claims:
            held.setdefault(one.name, []).append((rank, one))
    problems, index = [], {}
    for name, holders in held.items():
        kinds = {(one.dtype, one.shard.global_shape) for _, one in holders}
        mine = [(rank, one) for rank, one in holders if one.is_owner]
        dtype, shape = next(iter(kinds))
        problem = f"ranks disagree: {sorted(kinds)}" if len(kinds) > 1 else None
        problem = problem or tiling_problem(shape, [one.shard for _, one in mine])
        if problem:
            problems.append(f"{name} (owners: ranks {[rank for rank, _ in mine]}): {problem}")
        index[name] = Entry(dtype, shape, tuple(_piece(rank, one) for rank, one in mine if not is_empty(one.shard)))
    if problems:
        raise CheckpointError("each global tensor must be written exactly once: " + "; ".join(problems))
    return index


def _piece(rank: int, one: Claim) -> Piece:
    return Piece(shard_file.shard_file_name(rank), shard_file.key_of(one.name, one.shard.start), one.shard)
