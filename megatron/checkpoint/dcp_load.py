"""Storage reader and planner for ``torch.distributed.checkpoint.load``.

The planner requests this rank's shards. DCP computes which saved shards overlap with them.
"""

from __future__ import annotations

import io
import math
import os
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from megatron.checkpoint.file_visibility import FileVisibility
from megatron.checkpoint.metadata import Manifest, StoredShard, TensorEntry
from megatron.checkpoint.rank_errors import as_checkpoint_error
from megatron.checkpoint.shard_file import ShardFile
from megatron.checkpoint.tensor_record import DTYPES, TensorRecord, offsets, shard_shape
from megatron.errors import CheckpointError
from megatron.mpu.shard import Shard


class ShardReader(StorageReader):
    """Reads slices of the safetensors files in ``path``, one slice at a time to limit memory."""

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self._path = path
        shards_by_index = {
            MetadataIndex(name, offsets(stored_shard.shard)): stored_shard
            for name, entry in manifest.index.items()
            for stored_shard in entry.shards
        }
        tensors = {name: _tensor_metadata(entry) for name, entry in manifest.index.items()}
        self._metadata = Metadata(tensors, storage_data=shards_by_index)  # type: ignore[arg-type]
        self._open_files: dict[str, ShardFile] = {}
        self._visibility = FileVisibility()

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Do nothing (DCP's hook): a reader reads one checkpoint."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return False, so that DCP never selects this reader from a path."""
        return False

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the manifest's metadata; the manifest has been verified."""
        return self._metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Do nothing (DCP's hook)."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Copy every slice of ``plan`` into its target tensor, converted to the target's dtype."""
        with as_checkpoint_error(), torch.no_grad():
            for item in plan.items:
                slices = tuple(
                    slice(offset, offset + length)
                    for offset, length in zip(item.storage_offsets, item.lengths, strict=True)
                )
                values = self._read(self._metadata.storage_data[item.storage_index], slices)
                target = planner.resolve_tensor(item)
                planner.commit_tensor(item, target.copy_(values))
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _read(self, stored_shard: StoredShard, slices: tuple[slice, ...]) -> torch.Tensor:
        if stored_shard.file not in self._open_files:
            self._open_files[stored_shard.file] = ShardFile(self._path / stored_shard.file, self._visibility)
        values = self._open_files[stored_shard.file].read(stored_shard.key, slices)
        expected_shape = tuple(dim_slice.stop - dim_slice.start for dim_slice in slices)
        if tuple(values.shape) != expected_shape:
            raise CheckpointError(
                f"{self._path / stored_shard.file}: {stored_shard.key} has the shape {tuple(values.shape)}, expected "
                f"{expected_shape}"
            )
        return values


def _tensor_metadata(entry: TensorEntry) -> TensorStorageMetadata:
    chunks = [
        ChunkStorageMetadata(torch.Size(offsets(stored_shard.shard)), torch.Size(shard_shape(stored_shard.shard)))
        for stored_shard in entry.shards
    ]
    return TensorStorageMetadata(TensorProperties(DTYPES[entry.dtype]), torch.Size(entry.shape), chunks)


class RecordLoadPlanner(LoadPlanner):
    """Plans the reading of TensorRecords, without their padding.

    Args:
        check: raises if a name or shape does not match the checkpoint. It is called before anything is read.
    """

    def __init__(self, records: list[TensorRecord], check: Callable[[Iterable[tuple[str, Shard]]], None]) -> None:
        self._records, self._check = records, check
        self._metadata = Metadata({})
        self._reads: list[ReadItem] = []

    def set_up_planner(self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False) -> None:
        """Store the checkpoint's metadata. ``state_dict`` is not used: the planner has its records."""
        assert metadata is not None  # ShardReader always provides it
        self._metadata = metadata

    def create_local_plan(self) -> LoadPlan:
        """Compute this rank's read items; return an empty plan, since rank 0 does not need the items."""
        with as_checkpoint_error():
            self._check((record.name, record.shard) for record in self._records)
            self._reads = [item for idx in range(len(self._records)) for item in self._items(idx)]
            return LoadPlan([])

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return replace(central_plan, items=self._reads)

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        """Select the part of the record's tensor that ``read_item`` fills."""
        record = self._records[read_item.dest_index.index or 0]
        unpadded = record.shard.unpadded(record.tensor.detach())
        return unpadded[
            tuple(
                slice(offset, offset + length)
                for offset, length in zip(read_item.dest_offsets, read_item.lengths, strict=True)
            )
        ]

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """Do nothing (DCP's hook): ``tensor`` is a view of the record's tensor."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Raise TypeError: checkpoints of this project have no byte entries, only tensors and a JSON manifest."""
        raise TypeError("a checkpoint contains only tensors, no byte entries")

    def _items(self, record_idx: int) -> list[ReadItem]:
        name, shard = self._records[record_idx].name, self._records[record_idx].shard
        if math.prod(shard_shape(shard)) == 0:
            return []
        target_chunk = ChunkStorageMetadata(torch.Size(offsets(shard)), torch.Size(shard_shape(shard)))
        items = create_read_items_for_chunk_list(name, self._metadata.state_dict_metadata[name], [target_chunk])  # type: ignore[arg-type]
        return [replace(item, dest_index=MetadataIndex(name, target_chunk.offsets, record_idx)) for item in items]
