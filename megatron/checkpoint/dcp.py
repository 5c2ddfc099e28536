"""Planners and storage under torch.distributed.checkpoint (imported on first use, 0.6 s)."""

from __future__ import annotations

import errno
import io
import json
import math
import os
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed.checkpoint as torch_dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from megatron import files
from megatron.checkpoint import folders, shard_file
from megatron.checkpoint.metadata import (
    DTYPES,
    MANIFEST_NAME,
    Claim,
    Entry,
    FileFacts,
    Manifest,
    Piece,
    TensorRecord,
    claim,
    is_empty,
    manifest_to_bytes,
    offsets,
    owned,
    part_shape,
    tiling_problem,
)
from megatron.checkpoint.rank_errors import in_words, summary
from megatron.checkpoint.shard_file import FileVisibility, ShardFile
from megatron.errors import CheckpointError, marked
from megatron.log import human_bytes
from megatron.mpu.groups import Group
from megatron.mpu.shard import Shard

# One checkpoint folder, as ``torch.distributed.checkpoint.save`` has it written.
#
# | call | on | does |
# |---|---|---|
# | prepare_global_plan | rank 0 | checks the free space, makes the temporary folder; all ranks get its name |
# | write_data | every rank | writes its file, flushes it, tells size and checksum |
# | finish | rank 0 | writes the manifest, flushes file and folder, renames the folder: the commit |
# | abandon | rank 0 | after an error on any rank: removes the temporary folder |

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
_MANIFEST_BYTES_PER_TENSOR = 400  # generous; for the check of the free space only
_format_bytes = partial(human_bytes, units=("B", "kB", "MB", "GB"), digits=1)


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
            self._num_bytes = len(json.dumps(self._state)) + sum(plan.planner_data for plan in plans)
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
            content = Manifest(sequence, self._step, self._state, facts, metadata.planner_data)
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


# Who writes what: each rank tells what it holds, rank 0 checks that every global tensor is written exactly once.
#
# The planner that ``torch.distributed.checkpoint.save`` calls. DCP's own check of a plan only logs which tensor is
# wrong and where; this one says it in the error. What a rank writes stays with it:
# rank 0 gets what each holds, as plain values, for at thousands of ranks reading DCP's items takes minutes.


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


# The files of one checkpoint folder, as ``torch.distributed.checkpoint.load`` has them read.


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


# Who reads what: the parts of saved pieces that make up the records of this rank.
#
# The planner that ``torch.distributed.checkpoint.load`` calls; DCP finds the overlaps.


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


# The calls of ``torch.distributed.checkpoint``, whose import takes 0.6 s: this file is imported when first needed.
#
# DCP gathers plans and results over the ranks and makes an error on one rank an error on all. What is on the disk is
# this project's: planners and storage are its own, so nothing is ever pickled to a file or unpickled from one.

warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # one process alone is no accident here


def save(writer: ShardWriter, planner: RecordSavePlanner, world: Group) -> Path:
    """Let every rank of ``world`` write its share; return the committed checkpoint. Collective.

    Raises:
        CheckpointError: on all ranks alike; names the ranks that failed and why.
    """
    with _failures_in_words(world):
        metadata = torch_dcp.save(
            {}, storage_writer=writer, planner=planner, process_group=world.handle, no_dist=world.handle is None
        )
    assert metadata.storage_meta is not None and metadata.storage_meta.checkpoint_id is not None  # ShardWriter.finish
    return Path(metadata.storage_meta.checkpoint_id)


def load(reader: ShardReader, planner: RecordLoadPlanner, world: Group) -> None:
    """Let every rank of ``world`` read what its planner asks for. Collective.

    Raises:
        CheckpointError: as ``save``.
    """
    with _failures_in_words(world):
        torch_dcp.load(
            {}, storage_reader=reader, planner=planner, process_group=world.handle, no_dist=world.handle is None
        )


@contextmanager
def _failures_in_words(world: Group) -> Iterator[None]:
    try:
        yield
    except CheckpointException as caught:
        own = caught.failures.get(world.rank, (None, None))[0]
        if own is not None and not isinstance(own, Exception):
            raise own from caught  # Ctrl-C and the like end this rank as they would anywhere
        with marked(is_of_this_rank=False):  # DCP tells the failures of all ranks to each
            raise CheckpointError(summary(caught.failures, world.size)) from caught
