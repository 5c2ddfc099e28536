"""Storage writer and planner for ``torch.distributed.checkpoint.save``.

| call | on | effect |
|---|---|---|
| prepare_global_plan | rank 0 | checks the free space, creates the temporary folder; all ranks receive its name |
| write_data | every rank | writes its file, flushes it, reports its size and checksum |
| finish | rank 0 | writes the manifest, flushes the file and the folder, renames the folder (the commit) |
| abandon | rank 0 | removes the temporary folder after an error on any rank |

DCP's own validation of a plan only logs which tensor is wrong; ``RecordSavePlanner`` names it in the error. Write items
are not sent to rank 0, because unpickling the items of thousands of ranks takes minutes. Instead, rank 0 receives a
``Claim`` for each record, as a tuple of plain values.
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
from megatron.checkpoint.metadata import MANIFEST_NAME, FileInfo, Manifest, StoredShard, TensorEntry, manifest_to_bytes
from megatron.checkpoint.rank_errors import as_checkpoint_error
from megatron.checkpoint.tensor_record import (
    Claim,
    TensorRecord,
    is_empty,
    make_claim,
    offsets,
    select_owned,
    shard_shape,
    tiling_problem,
)
from megatron.errors import CheckpointError
from megatron.log import human_bytes

_DISK_FULL_ERRNOS = (errno.ENOSPC, errno.EDQUOT)
_MANIFEST_BYTES_PER_TENSOR = 400  # generous estimate, only for the check of the free space
_format_bytes = partial(human_bytes, units=("B", "kB", "MB", "GB"), digits=1)


class ShardWriter(StorageWriter):
    """Writes the checkpoint of ``step`` into ``root``; rank 0's ``metadata`` is stored in the manifest."""

    def __init__(self, root: Path, step: int, metadata: dict[str, Any], rank: int) -> None:
        self._root, self._step, self._metadata, self._rank = root, step, metadata, rank
        self._temporary: Path | None = None  # on rank 0: set before the folder is created
        self._num_bytes = 0

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Do nothing (DCP's hook): a writer writes one checkpoint."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return False, so that DCP never selects this writer from a path."""
        return False

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Do nothing (DCP's hook)."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Check the free disk space, create the temporary folder, and add its path to every rank's plan."""
        with as_checkpoint_error(is_of_this_rank=False):
            self._num_bytes = len(json.dumps(self._metadata)) + sum(plan.planner_data for plan in plans)
            files.make_folder(self._root)
            folders.remove_stale(self._root)
            free_bytes = files.free_bytes(self._root)
            if self._num_bytes > free_bytes:
                raise CheckpointError(
                    f"it needs {_format_bytes(self._num_bytes)}, but only {_format_bytes(free_bytes)} are free. "
                    "Free some space, lower --keep-last, or set --save to another disk."
                )
            self._temporary = folders.temporary_path(folders.unused_path(self._root, self._step))
            files.make_folder(self._temporary)
            return [replace(plan, storage_data=self._temporary, planner_data=None) for plan in plans]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's file, unless it owns no tensors."""
        future: Future[list[WriteResult]] = Future()
        with as_checkpoint_error():
            tensors = {_key(item): cast(torch.Tensor, planner.resolve_data(item)) for item in plan.items}
            if not tensors:
                future.set_result([])
                return future
            name = shard_file.shard_file_name(self._rank)
            FileVisibility().wait_for(plan.storage_data)
            size, crc32 = shard_file.write_shard_file(plan.storage_data / name, tensors)
            future.set_result([WriteResult(MetadataIndex(name), size, FileInfo(size, crc32))])
            return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the manifest, commit, and store the path in ``metadata``, which DCP then sends to all ranks."""
        with as_checkpoint_error(is_of_this_rank=False):
            assert self._temporary is not None  # set by prepare_global_plan on this rank
            file_infos = {result.index.fqn: result.storage_data for rank_results in results for result in rank_results}
            sequence = folders.last_sequence(folders.list_checkpoints(self._root)) + 1
            manifest = Manifest(sequence, self._step, self._metadata, file_infos, metadata.planner_data)
            files.write_bytes(self._temporary / MANIFEST_NAME, manifest_to_bytes(manifest))
            files.sync_folder(self._temporary)
            target = folders.unused_path(self._root, self._step)
            folders.commit_checkpoint(self._temporary, target)
            metadata.planner_data = None  # other ranks do not need the index
            metadata.storage_meta = StorageMeta(checkpoint_id=target)

    def abandon(self, error_text: str) -> str:
        """Remove the temporary folder, and explain the error.

        Args:
            error_text: text of the error that ended the save.

        Returns:
            Text to append to the error message. For a full disk it states the bytes needed and free, for a file size
            limit the limit; for all other errors it is "".
        """
        if self._temporary is None:
            return ""
        with suppress(OSError):
            files.remove_tree(self._temporary)
        if f"[Errno {errno.EFBIG}]" in error_text:
            return f" (one of its files is {files.too_large_message()})"
        if not any(f"[Errno {code}]" in error_text for code in _DISK_FULL_ERRNOS):
            return ""
        with suppress(OSError):
            free_space = _format_bytes(files.free_bytes(self._root))
            return f" (needed {_format_bytes(self._num_bytes)}, now free {free_space})"
        return ""


def _key(item: WriteItem) -> str:
    """Build the key of ``item`` in its safetensors file."""
    shape, start = item.tensor_data.chunk.sizes, item.index.offset  # type: ignore[union-attr]
    return shard_file.shard_key(item.index.fqn, max(start or torch.Size([0]), default=0) if shape else 0)


def _num_bytes(item: WriteItem) -> int:
    data = item.tensor_data
    assert data is not None  # this project's planner only makes items of tensors
    return math.prod(data.chunk.sizes) * data.properties.dtype.itemsize


class RecordSavePlanner(SavePlanner):
    """Plans the save of TensorRecords; ``get_records`` is called once."""

    def __init__(self, get_records: Callable[[], list[TensorRecord]]) -> None:
        self._get_records = get_records
        self._tensors: dict[MetadataIndex, torch.Tensor] = {}
        self._items: list[WriteItem] = []

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        """Do nothing (DCP's hook). The records come from ``get_records``, since a state dict has no shards."""

    def create_local_plan(self) -> SavePlan:
        """Build a plan whose planner data are the claims of this rank's records and the bytes that it will write."""
        with as_checkpoint_error():
            records = self._get_records()
            claims = [make_claim(record) for record in records]
            owned_records = list(select_owned(records).values())
            self._items = [_write_item(record) for record in owned_records]
            self._tensors = {item.index: record.tensor for item, record in zip(self._items, owned_records, strict=True)}
            num_bytes = sum(_num_bytes(item) + _MANIFEST_BYTES_PER_TENSOR for item in self._items)
            return SavePlan([], planner_data=([local_claim.packed() for local_claim in claims], num_bytes))

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Check the claims of all ranks; the metadata has the manifest's index as planner data.

        In the returned plans, the planner data is the byte count to write, which ``ShardWriter`` compares with the
        free space.
        """
        with as_checkpoint_error(is_of_this_rank=False):
            index = global_index(
                [[Claim.unpacked(*packed_claim) for packed_claim in plan.planner_data[0]] for plan in all_plans]
            )
            plans = [replace(plan, planner_data=plan.planner_data[1]) for plan in all_plans]
            return plans, Metadata({}, planner_data=index)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """Return this rank's write items, with the target folder chosen by rank 0."""
        return replace(new_plan, items=self._items)

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor:
        """Select the tensor on its device. The writer copies it to the host just before writing it."""
        return self._tensors[write_item.index]


def _write_item(record: TensorRecord) -> WriteItem:
    shard = record.shard
    chunk = ChunkStorageMetadata(torch.Size(offsets(shard)), torch.Size(shard_shape(shard)))
    data = TensorWriteData(chunk, TensorProperties(record.tensor.dtype), torch.Size(shard.global_shape))
    return WriteItem(MetadataIndex(record.name, chunk.offsets), WriteItemType.SHARD, tensor_data=data)


def global_index(claims_of_ranks: list[list[Claim]]) -> dict[str, TensorEntry]:
    """Build the manifest entry of each global tensor.

    Raises:
        CheckpointError: ranks disagree on a tensor, or a tensor is not written exactly once; lists all such tensors.
    """
    holders_by_name: dict[str, list[tuple[int, Claim]]] = {}
    for rank, claims in enumerate(claims_of_ranks):
        for held_claim in claims:
            holders_by_name.setdefault(held_claim.name, []).append((rank, held_claim))
    problems, index = [], {}
    for name, holders in holders_by_name.items():
        variants = {(held_claim.dtype, held_claim.shard.global_shape) for _, held_claim in holders}
        owner_claims = [(rank, held_claim) for rank, held_claim in holders if held_claim.is_owner]
        dtype, shape = next(iter(variants))
        problem = f"ranks disagree: {sorted(variants)}" if len(variants) > 1 else None
        problem = problem or tiling_problem(shape, [held_claim.shard for _, held_claim in owner_claims])
        if problem:
            problems.append(f"{name} (owners: ranks {[rank for rank, _ in owner_claims]}): {problem}")
        index[name] = TensorEntry(
            dtype,
            shape,
            tuple(
                _stored_shard(rank, held_claim) for rank, held_claim in owner_claims if not is_empty(held_claim.shard)
            ),
        )
    if problems:
        raise CheckpointError("each global tensor must be written exactly once: " + "; ".join(problems))
    return index


def _stored_shard(rank: int, owner_claim: Claim) -> StoredShard:
    return StoredShard(
        shard_file.shard_file_name(rank),
        shard_file.shard_key(owner_claim.name, owner_claim.shard.start),
        owner_claim.shard,
    )
