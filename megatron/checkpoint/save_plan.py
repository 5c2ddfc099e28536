"""Who writes what: each rank tells what it holds, rank 0 checks that every global tensor is written exactly once.

The planner that ``torch.distributed.checkpoint.save`` calls. DCP's own check of a plan only logs which tensor is wrong
and where; this one says it in the error.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, TensorWriteData, WriteItem, WriteItemType

from megatron.checkpoint import shard_file
from megatron.checkpoint.causes import in_words
from megatron.checkpoint.manifest import Entry, Piece
from megatron.checkpoint.records import (
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


class RecordSavePlanner(SavePlanner):
    """Plans the save of TensorRecords; ``source`` is asked for them once."""

    def __init__(self, source: Callable[[], list[TensorRecord]]) -> None:
        self._source = source
        self._tensors: dict[MetadataIndex, torch.Tensor] = {}

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        """DCP's hook; the records come from ``source``, since a state dict has no place for their shards."""

    def create_local_plan(self) -> SavePlan:
        """Return what this rank writes, and as planner data what it holds."""
        with in_words():
            records = self._source()
            claims = [claim(record) for record in records]
            self._tensors, items = {}, []
            for record in owned(records).values():
                items.append(_item(record))
                self._tensors[items[-1].index] = record.tensor
            return SavePlan(items, planner_data=claims)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Check the plans of all ranks; the index of the manifest is the planner data of what comes back."""
        with in_words(is_of_this_rank=False):
            index = global_index([plan.planner_data for plan in all_plans])
            return [replace(plan, planner_data=None) for plan in all_plans], Metadata({}, planner_data=index)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """Return the plan as it is."""
        return new_plan

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
    return Piece(shard_file.name_of(rank), shard_file.key_of(one.name, one.shard.start), one.shard)
