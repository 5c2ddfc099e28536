"""save: shards, manifest, commit by rename; --async-save: staged copy, background thread, durable."""

from __future__ import annotations

import copy
import mmap
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any

import torch
import torch.distributed as dist

from megatron import device, log
from megatron.checkpoint import folders
from megatron.checkpoint.folders import RetentionPolicy, remove_old
from megatron.checkpoint.metadata import TensorRecord, owned
from megatron.errors import CheckpointError, ConfigError, marked
from megatron.mpu.groups import Group

# Saving: shards into a temporary folder, one manifest, one rename.
#
# 1. Every rank tells what it holds; rank 0 checks that each global tensor is written exactly once and that the disk
#    has room, and makes the temporary folder.
# 2. Every rank writes its file, flushes it and tells its size and checksum.
# 3. Rank 0 writes the manifest, flushes file and folder, and renames the folder. That rename is the commit.
#
# ``torch.distributed.checkpoint`` (DCP) takes the ranks through these steps, with a planner and a writer of this
# project. An error on any rank up to the commit is an error on all; older checkpoints are not touched. After it, what
# is left (the hint, the removal of old ones) can only cost a warning.


def save(
    root: Path,
    step: int,
    records: list[TensorRecord],
    state: dict[str, Any],
    world: Group,
    *,
    keep_last: int | None = None,
    keep_every: int | None = None,
    loaded: Path | None = None,
    keep_automatic: int | None = None,
    earlier: int = 0,
) -> Path:
    """Write the checkpoint ``root/step-00000020`` and return its path. Collective over ``world``.

    Args:
        records: the tensors that this rank holds. A name may be held by many ranks and is written by its owners.
        state: what JSON can hold (tuples come back as lists); rank 0's is written.
        keep_last: afterwards delete all but so many complete checkpoints (at least 1); None keeps all.
        keep_every: never delete one whose step is a multiple of this.
        loaded: the checkpoint that this run started from, which is never deleted.
        keep_automatic: without ``keep_last``: delete all but so many of those whose state says ``folders.AUTOMATIC``.
        earlier: never delete one of this sequence number or a lower one.

    Raises:
        CheckpointError: on all ranks alike, when any rank failed. The checkpoints in ``root`` are as they were.
        ConfigError: ``keep_last`` or ``keep_every`` is below 1.
    """
    check_keep(keep_last, keep_every)
    keep = RetentionPolicy(keep_last, keep_every, loaded, keep_automatic, earlier)
    return save_from(lambda: records, root, step, state, world, keep)


def check_keep(keep_last: int | None, keep_every: int | None) -> None:
    """Check that numbers of checkpoints to keep are such.

    Raises:
        ConfigError: one is below 1.
    """
    for flag, value in (("--keep-last", keep_last), ("--keep-every", keep_every)):
        if value is not None and value < 1:
            raise ConfigError(f"{flag} must be at least 1, got {value}")


@marked(is_of_this_rank=False)
def save_from(
    source: Callable[[], list[TensorRecord]],
    root: Path,
    step: int,
    state: dict[str, Any],
    world: Group,
    keep: RetentionPolicy,
) -> Path:
    """Do what ``save`` does with the records that ``source`` returns; one that raises fails the save. Collective."""
    from megatron.checkpoint import dcp  # 0.6 s, so not before the first save

    root = Path(root)
    writer = dcp.ShardWriter(root, step, state if world.rank == 0 else {}, world.rank)
    try:
        path = dcp.save(writer, dcp.RecordSavePlanner(source), world)
    except CheckpointError as error:
        left = world.broadcast_object(writer.abandon(str(error)) if world.rank == 0 else "")
        raise CheckpointError(f"the checkpoint of step {step} was not saved to {root}: {error}{left}") from error
    if world.rank == 0:
        _clean_up(root, path, keep)
    return path


def _clean_up(root: Path, path: Path, keep: RetentionPolicy) -> None:
    """Point the hint at ``path`` and delete old checkpoints: the save has succeeded whatever happens here."""
    folders.write_latest(root, path)
    try:
        remove_old(folders.list_checkpoints(root), keep)
    except OSError as error:
        log.warning(f"old checkpoints in {root} could not be deleted ({error}); {path} is complete")


# A copy of a rank's tensors on the host, so that training may change the originals while the copy is written.


class StagingBuffer:
    """Host memory for one copy of what a rank owns, kept from save to save: only the first one pays for the pages."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    def copy(self, records: list[TensorRecord]) -> tuple[list[TensorRecord], int]:
        """Return ``records`` with the values of now, and how many bytes were copied.

        What this rank does not own has shape and type only. The copies are good until the next call.
        """
        mine = owned(records)
        num_bytes = sum(record.tensor.nbytes for record in mine.values())
        self._make_room(num_bytes, any(device.can_pin(record.tensor.device.type) for record in mine.values()))
        copies: dict[int, TensorRecord] = {}
        start = 0
        for place, record in mine.items():  # the widest types come first, so that each start is a multiple of the type
            stop = start + record.tensor.nbytes
            held = self._memory[start:stop].view(record.tensor.dtype).view(record.tensor.shape)
            held.copy_(record.tensor, non_blocking=True)
            copies[place] = replace(record, tensor=held)
            start = stop
        for source in {record.tensor.device for record in mine.values()}:
            device.finish_copies(source)
        return [copies.get(i) or _without_values(record) for i, record in enumerate(records)], num_bytes

    def _make_room(self, num_bytes: int, is_pinned: bool) -> None:
        if self._memory.numel() < num_bytes:
            self._memory = torch.empty(0, dtype=torch.uint8)  # first give back what is too small
            if is_pinned:
                self._memory = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
            else:
                self._memory = torch.frombuffer(_large_pages(num_bytes), dtype=torch.uint8)


def _large_pages(num_bytes: int) -> mmap.mmap:
    """Return fresh memory in pages of 2 MiB where the system has them: their first use costs a tenth of small ones'."""
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def _without_values(record: TensorRecord) -> TensorRecord:
    return replace(record, tensor=torch.empty_like(record.tensor, device="meta"))


# Saving while training goes on: the tensors are copied, and a thread of its own writes the copy.
#
# The save itself is ``saving.save``, with the same bytes and the same commit; it only runs later. So a kill at any
# moment leaves the older checkpoints as they are. One save is under way at a time: the next ``start`` waits for it.

PATIENCE = timedelta(hours=2)
"""How long a rank's background save waits for the slowest disk of another; a rank that dies is noticed at once."""


@dataclass(frozen=True)
class Staged:
    """A copy has been made: training may go on and change the tensors.

    Args:
        seconds: the copying. num_bytes: of this rank. waited_s: for the save before, which was still under way.
    """

    step: int
    seconds: float
    num_bytes: int
    waited_s: float


@dataclass(frozen=True)
class Committed:
    """A checkpoint is on the disk, whole and committed; ``seconds`` after its copy was made."""

    step: int
    path: Path
    seconds: float
    num_bytes: int


class AsyncSaver:
    """Saves in the background, one checkpoint at a time. Collective to construct.

    It has a gloo group of its own, since its talk between ranks runs beside that of training. Host memory: a copy of
    what this rank owns, kept until ``close``.
    """

    def __init__(self, world: Group) -> None:
        self._world = world
        if world.handle is not None:
            own = dist.new_group(list(world.ranks), backend="gloo", timeout=PATIENCE)
            self._world = replace(world, handle=own)
        self._staging = StagingBuffer()
        self._thread: Thread | None = None
        self._outcomes: deque[Committed | BaseException] = deque()

    def start(
        self,
        root: Path,
        step: int,
        records: list[TensorRecord],
        state: dict[str, Any],
        *,
        keep_last: int | None = None,
        keep_every: int | None = None,
        loaded: Path | None = None,
        keep_automatic: int | None = None,
        earlier: int = 0,
    ) -> Staged:
        """Copy the tensors and begin to write them as ``saving.save`` would; return when they are copied. Collective.

        A failure, also of the copying, is told by ``poll`` or ``finish``, on all ranks alike.

        Raises:
            ConfigError: as ``saving.save``.
        """
        check_keep(keep_last, keep_every)
        began = time.perf_counter()
        self._join()
        waited_s = time.perf_counter() - began
        own_state = copy.deepcopy(state) if self._world.rank == 0 else {}
        source, num_bytes = self._copy(records)
        staged = Staged(step, time.perf_counter() - began - waited_s, num_bytes, waited_s)
        keep = RetentionPolicy(keep_last, keep_every, loaded, keep_automatic, earlier)
        write = partial(save_from, source, root, step, own_state, self._world, keep)
        # a daemon: a job that fails does not wait for a disk
        self._thread = Thread(target=self._write, args=(write, step, num_bytes), name=f"save-{step}", daemon=True)
        self._thread.start()
        return staged

    def poll(self) -> Committed | None:
        """Return what has become durable since the last call, or None; never blocks. Not collective.

        Ranks may see it some steps apart.

        Raises:
            CheckpointError: the save failed, once; older checkpoints are as they were.
            RuntimeError: of the process group, when another rank died.
        """
        if not self._outcomes:
            return None
        outcome = self._outcomes.popleft()
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    def finish(self) -> Committed | None:
        """Wait for the save under way; return the last that has become durable since the last call. Collective.

        Raises:
            as ``poll``.
        """
        self._join()
        last = None
        while (found := self.poll()) is not None:
            last = found
        return last

    def close(self) -> None:
        """Wait for the save under way and give back memory and process group. Collective."""
        self._join()
        self._staging = StagingBuffer()
        if self._world.handle is not None:
            dist.destroy_process_group(self._world.handle)
            self._world = replace(self._world, handle=None)

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _copy(self, records: list[TensorRecord]) -> tuple[Callable[[], list[TensorRecord]], int]:
        """Return what gives the copied records, and their bytes.

        A failure is raised in the save, which tells all ranks: one that raised it here would let the others wait.
        """
        try:
            copied, num_bytes = self._staging.copy(records)
        except Exception as error:
            return partial(_raise, error), 0
        return lambda: copied, num_bytes

    def _write(self, write: partial[Path], step: int, num_bytes: int) -> None:
        began = time.perf_counter()
        try:
            self._outcomes.append(Committed(step, write(), time.perf_counter() - began, num_bytes))
        except BaseException as error:  # raised again by poll in the thread that trains
            self._outcomes.append(error)


def _raise(error: Exception) -> list[TensorRecord]:
    raise error
