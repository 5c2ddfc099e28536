"""Write a ``torch_dist`` folder with torch.distributed.checkpoint, one tensor at a time."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as torch_dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, TensorWriteData, WriteItem, WriteItemType

from megatron.checkpoint.rank_errors import summarize_failures
from megatron.errors import CheckpointError


@dataclass(frozen=True)
class TensorEntry:
    """A chunk of a tensor to write.

    Args:
        shape: the full tensor's shape.
        load: returns the chunk; called when it is written.
    """

    name: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    dtype: torch.dtype
    load: Callable[[], torch.Tensor]


class _EntryPlanner(SavePlanner):
    """Plans the save of tensor chunks and objects in a single process.

    Args:
        objects: name -> value for byte entries.
    """

    def __init__(self, entries: list[TensorEntry], objects: dict[str, Any]) -> None:
        self._entries = {_index(entry): entry for entry in entries}
        self._objects = objects

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        """Do nothing (DCP's hook): the planner has its entries."""

    def create_local_plan(self) -> SavePlan:
        items = [_write_item(entry) for entry in self._entries.values()]
        items += [WriteItem(MetadataIndex(name), WriteItemType.BYTE_IO) for name in self._objects]
        return SavePlan(items)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        tensors: dict[str, TensorStorageMetadata] = {}
        for entry in self._entries.values():
            properties = TensorProperties(entry.dtype)
            full = tensors.setdefault(entry.name, TensorStorageMetadata(properties, torch.Size(entry.shape), []))
            full.chunks.append(ChunkStorageMetadata(torch.Size(entry.offsets), torch.Size(entry.sizes)))
        objects = {name: BytesStorageMetadata() for name in self._objects}
        return all_plans, Metadata({**tensors, **objects})

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return replace(new_plan)

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        """Load an entry's values when they are written."""
        if write_item.type == WriteItemType.BYTE_IO:
            buffer = io.BytesIO()
            torch.save(self._objects[write_item.index.fqn], buffer)
            return buffer
        entry = self._entries[write_item.index]
        values = entry.load().to(entry.dtype)
        return values.reshape(entry.sizes).contiguous()


def _index(entry: TensorEntry) -> MetadataIndex:
    return MetadataIndex(entry.name, torch.Size(entry.offsets))


def _write_item(entry: TensorEntry) -> WriteItem:
    chunk = ChunkStorageMetadata(torch.Size(entry.offsets), torch.Size(entry.sizes))
    data = TensorWriteData(chunk, TensorProperties(entry.dtype), torch.Size(entry.shape))
    return WriteItem(_index(entry), WriteItemType.SHARD, tensor_data=data)


def write_entries(folder: Path, entries: list[TensorEntry], objects: dict[str, Any]) -> None:
    """Write ``.metadata`` and ``__0_0.distcp`` into ``folder``.

    Raises:
        CheckpointError: a tensor cannot be read, or a file cannot be written.
    """
    writer = FileSystemWriter(folder, single_file_per_rank=True, sync_files=True, thread_count=1)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # one process is intended
            torch_dcp.save({}, storage_writer=writer, planner=_EntryPlanner(entries, objects), no_dist=True)
    except CheckpointException as error:
        raise CheckpointError(summarize_failures(error.failures, 1)) from error
