"""Who reads what: the parts of saved pieces that make up the records of this rank.

The planner that ``torch.distributed.checkpoint.load`` calls; DCP finds the overlaps.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from megatron.checkpoint.causes import in_words
from megatron.checkpoint.records import TensorRecord, offsets, part_shape
from megatron.mpu.shard import Shard


class RecordLoadPlanner(LoadPlanner):
    """Plans the reading of TensorRecords, padding left out.

    Args:
        check: raises when a name or shape does not fit the checkpoint. It is called before anything is read.
    """

    def __init__(self, records: list[TensorRecord], check: Callable[[Iterable[tuple[str, Shard]]], None]) -> None:
        self._records, self._check = records, check
        self._metadata = Metadata({})

    def set_up_planner(self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False) -> None:
        """Take the checkpoint's metadata; the records are in the place of a state dict."""
        assert metadata is not None  # ShardReader always has it
        self._metadata = metadata

    def create_local_plan(self) -> LoadPlan:
        """Return what to read for each record."""
        with in_words():
            self._check((record.name, record.shard) for record in self._records)
            return LoadPlan([item for place in range(len(self._records)) for item in self._items(place)])

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans as they are."""
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        """Return the plan as it is."""
        return central_plan

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
