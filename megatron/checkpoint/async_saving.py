"""AsyncSaver: stage the tensors on the host, then write and commit in a background thread.

The background thread runs ``saving.write_checkpoint``, with the same bytes and the same commit as a synchronous save,
so a kill at any moment leaves the older checkpoints unchanged. One save runs at a time: the next one waits for it.
"""

from __future__ import annotations

import copy
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from threading import Thread

import torch.distributed as dist

from megatron.checkpoint.retention import ALL, RetentionPolicy
from megatron.checkpoint.saving import CapturedState, write_checkpoint
from megatron.checkpoint.staging_buffer import StagingBuffer
from megatron.checkpoint.tensor_record import TensorRecord
from megatron.mpu.groups import Group

PATIENCE = timedelta(hours=2)
"""How long a rank's background save waits for the slowest disk of another; a rank that dies is noticed at once."""


@dataclass(frozen=True)
class Staged:
    """The tensors have been copied: training may continue and change them.

    Args:
        seconds: time of the copy.
        num_bytes: bytes copied on this rank.
    """

    step: int
    seconds: float
    num_bytes: int


@dataclass(frozen=True)
class Committed:
    """A checkpoint is committed to disk, ``seconds`` after its copy was made."""

    step: int
    path: Path
    seconds: float
    num_bytes: int


class AsyncSaver:
    """Saves in the background, one checkpoint at a time. Collective to construct.

    It uses its own gloo group, because its collectives run concurrently with those of training. Host memory: a copy of
    the tensors that this rank writes, allocated until ``close``.
    """

    def __init__(self, world: Group) -> None:
        self._world = world
        if world.handle is not None:
            own = dist.new_group(list(world.ranks), backend="gloo", timeout=PATIENCE)
            self._world = replace(world, handle=own)
        self._staging = StagingBuffer()
        self._thread: Thread | None = None
        self._outcomes: deque[Committed | BaseException] = deque()

    def save(self, root: Path, captured: CapturedState, retention: RetentionPolicy = ALL) -> Staged:
        """Copy the tensors, start to write them in the background, and return after the copy. Collective.

        Waits for the previous save first. ``poll`` and ``finish`` report a failure, also one of the copy, on all ranks
        alike.
        """
        self._join()
        began = time.perf_counter()
        metadata = copy.deepcopy(captured.metadata) if self._world.rank == 0 else {}
        get_records, num_bytes = self._copy(captured.records)
        staged = Staged(captured.step, time.perf_counter() - began, num_bytes)
        write = partial(write_checkpoint, root, captured.step, get_records, metadata, self._world, retention)
        self._thread = Thread(
            target=self._write,
            args=(write, captured.step, num_bytes),
            name=f"save-{captured.step}",
            daemon=True,  # a failing job does not wait for a disk
        )
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
