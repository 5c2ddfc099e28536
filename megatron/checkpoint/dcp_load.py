"""Storage reader and planner for ``torch.distributed.checkpoint.load``.

The planner that ``torch.distributed.checkpoint.load`` calls; DCP finds the overlaps.
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
from megatron.checkpoint.metadata import Entry, Manifest, Piece
from megatron.checkpoint.rank_errors import in_words
from megatron.checkpoint.shard_file import ShardFile
from megatron.checkpoint.tensor_record import DTYPES, TensorRecord, offsets, part_shape
from megatron.errors import CheckpointError
from megatron.mpu.shard import Shard


class ShardReader(StorageReader):
    """Reads slices of the safetensors files in ``path``; one slice at a time is in memory beside its target."""

    def __init__(self, path: Path, content: Manifest) -> None:
        self._path = path
        pieces = {
            MetadataIndex(name, offsets(piece.shard)): piece
            for name, entry in content.index.items()
            for piece in entry.pieces
        }
        tensors = {name: _tensor_metadata(entry) for name, entry in content.index.items()}
        self._metadata = Metadata(tensors, storage_data=pieces)  # type: ignore[arg-type]
        self._open: dict[str, ShardFile] = {}
        self._patience = FileVisibility()

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """DCP's hook; a reader reads one checkpoint."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return False: DCP never picks this reader by a path alone."""
        return False

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return what the manifest says, which has been verified."""
        return self._metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """DCP's hook; nothing to prepare."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return the plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans as they are."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Copy every slice of ``plan`` to where it belongs, converted to the type that is there."""
        with in_words(), torch.no_grad():
            for item in plan.items:
                cuts = tuple(slice(o, o + n) for o, n in zip(item.storage_offsets, item.lengths, strict=True))
                part = self._read(self._metadata.storage_data[item.storage_index], cuts)
                target = planner.resolve_tensor(item)
                planner.commit_tensor(item, target.copy_(part))
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read(self, piece: Piece, cuts: tuple[slice, ...]) -> torch.Tensor:
        if piece.file not in self._open:
            self._open[piece.file] = ShardFile(self._path / piece.file, self._patience)
        part = self._open[piece.file].read(piece.key, cuts)
        said = tuple(cut.stop - cut.start for cut in cuts)
        if tuple(part.shape) != said:
            raise CheckpointError(f"{self._path / piece.file}: {piece.key} gave {tuple(part.shape)} instead of {said}")
        return part


def _tensor_metadata(entry: Entry) -> TensorStorageMetadata:
    chunks = [
        ChunkStorageMetadata(torch.Size(offsets(piece.shard)), torch.Size(part_shape(piece.shard)))
        for piece in entry.pieces
    ]
    return TensorStorageMetadata(TensorProperties(DTYPES[entry.dtype]), torch.Size(entry.shape), chunks)


class RecordLoadPlanner(LoadPlanner):
    """Plans the reading of TensorRecords, padding left out.

    Args:
        check: raises when a name or shape does not fit the checkpoint. It is called before anything is read.
    """

    def __init__(self, records: list[TensorRecord], check: Callable[[Iterable[tuple[str, Shard]]], None]) -> None:
        self._records, self._check = records, check
        self._metadata = Metadata({})
        self._reads: list[ReadItem] = []

    def set_up_planner(self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False) -> None:
        """Take the checkpoint's metadata; the records are in the place of a state dict."""
        assert metadata is not None  # ShardReader always has it
        self._metadata = metadata

    def create_local_plan(self) -> LoadPlan:
        """Find what to read for each record; nobody else needs to know, so an empty plan goes to rank 0."""
        with in_words():
            self._check((record.name, record.shard) for record in self._records)
            self._reads = [item for place in range(len(self._records)) for item in self._items(place)]
            return LoadPlan([])

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans as they are."""
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        """Return what this rank reads."""
        return replace(central_plan, items=self._reads)

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        """Return the part of the record's tensor that ``read_item`` fills."""
        record = self._records[read_item.dest_index.index or 0]
        part = record.shard.unpadded(record.tensor.detach())
        return part[tuple(slice(o, o + n) for o, n in zip(read_item.dest_offsets, read_item.lengths, strict=True))]

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """DCP's hook; ``tensor`` is a view of the record's, so there is nothing left to do."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Refuse: this project's checkpoints hold tensors, and JSON in their manifest."""
        raise TypeError("a checkpoint holds no bytes beside tensors")

    def _items(self, place: int) -> list[ReadItem]:
        name, shard = self._records[place].name, self._records[place].shard
        if math.prod(part_shape(shard)) == 0:
            return []
        wanted = ChunkStorageMetadata(torch.Size(offsets(shard)), torch.Size(part_shape(shard)))
        found = create_read_items_for_chunk_list(name, self._metadata.state_dict_metadata[name], [wanted])  # type: ignore[arg-type]
        return [replace(item, dest_index=MetadataIndex(name, wanted.offsets, place)) for item in found]
