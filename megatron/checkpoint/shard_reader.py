"""The files of one checkpoint folder, as ``torch.distributed.checkpoint.load`` has them read."""

from __future__ import annotations

import os
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
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from megatron.checkpoint.causes import in_words
from megatron.checkpoint.manifest import Entry, Manifest, Piece
from megatron.checkpoint.records import DTYPES, offsets, part_shape
from megatron.checkpoint.shard_file import ShardFile
from megatron.checkpoint.visibility import Patience
from megatron.errors import CheckpointError


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
        self._patience = Patience()

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
