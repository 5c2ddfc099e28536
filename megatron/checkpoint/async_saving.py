"""Asynchronous saves: copy the tensors to the host, then write and commit them in a background thread.

The background thread runs ``saving.write_checkpoint``, with the same bytes and the same commit as a synchronous save,
so a kill at any time leaves the older checkpoints unchanged. One save runs at a time: the next one waits for it.
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

from megatron.checkpoint.retention import KEEP_ALL, RetentionPolicy
from megatron.checkpoint.saving import CapturedState, write_checkpoint
from megatron.checkpoint.staging_buffer import StagingBuffer
from megatron.checkpoint.tensor_record import TensorRecord
from megatron.mpu.groups import Group

COLLECTIVE_TIMEOUT = timedelta(hours=2)
"""Timeout of a background save's collectives, long enough for a slow disk. If a rank dies, they fail at once."""


@dataclass(frozen=True)
class Staged:
    """Result of ``AsyncSaver.save``: the tensors are copied to the host, so training may modify the originals.

    Args:
        seconds: duration of the copy.
        num_bytes: bytes copied on this rank.
    """

    step: int
    seconds: float
    num_bytes: int


@dataclass(frozen=True)
class Committed:
    """A checkpoint that a background save has committed to disk.

    Args:
        seconds: time from the end of the copy to the commit.
        num_bytes: bytes copied on this rank.
    """

    step: int
    path: Path
    seconds: float
    num_bytes: int


class AsyncSaver:
    """Saves checkpoints in the background, one at a time. The constructor is collective.

    It uses its own gloo group, because its collectives run concurrently with the collectives of training. It allocates
    host memory for a copy of the tensors that this rank writes and frees it in ``close``.
    """

    def __init__(self, world: Group) -> None:
        self._world = world
        if world.handle is not None:
            handle = dist.new_group(list(world.ranks), backend="gloo", timeout=COLLECTIVE_TIMEOUT)
            self._world = replace(world, handle=handle)
        self._staging = StagingBuffer()
        self._thread: Thread | None = None
        self._outcomes: deque[Committed | BaseException] = deque()

    def save(self, root: Path, captured: CapturedState, retention: RetentionPolicy = KEEP_ALL) -> Staged:
        """Copy the tensors, start writing them in the background, and return after the copy. Collective.

        Waits for the previous save first. Errors, including errors of the copy, are raised on all ranks by ``poll`` and
        ``finish``.
        """
        self._join()
        start_time = time.perf_counter()
        metadata = copy.deepcopy(captured.metadata) if self._world.rank == 0 else {}
        get_records, num_bytes = self._copy(captured.records)
        staged = Staged(captured.step, time.perf_counter() - start_time, num_bytes)
        write = partial(write_checkpoint, root, captured.step, get_records, metadata, self._world, retention)
        self._thread = Thread(
            target=self._write,
            args=(write, captured.step, num_bytes),
            name=f"save-{captured.step}",
            daemon=True,  # a failing job must not wait for the disk
        )
        self._thread.start()
        return staged

    def poll(self) -> Committed | None:
        """Return the checkpoint that was committed since the previous call, or None; never blocks. Not collective.

        Ranks may see the same commit at different steps.

        Raises:
            CheckpointError: the save failed; raised once. Older checkpoints are unchanged.
            RuntimeError: raised by the process group when another rank died.
        """
        if not self._outcomes:
            return None
        outcome = self._outcomes.popleft()
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    def finish(self) -> Committed | None:
        """Wait for the running save; return the last checkpoint committed since the previous call, or None. Collective.

        Raises:
            as ``poll``.
        """
        self._join()
        last = None
        while (committed := self.poll()) is not None:
            last = committed
        return last

    def close(self) -> None:
        """Wait for the running save, then free the host memory and destroy the process group. Collective."""
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
        """Copy the tensors; return (function that returns the copied records, number of bytes copied).

        If the copy fails, the error is raised by the returned function: the background save calls it and propagates the
        error to all ranks. Raising it here would leave the other ranks waiting.
        """
        try:
            copied_records, num_bytes = self._staging.copy(records)
        except Exception as error:
            return partial(_raise, error), 0
        return lambda: copied_records, num_bytes

    def _write(self, write: partial[Path], step: int, num_bytes: int) -> None:
        start_time = time.perf_counter()
        try:
            self._outcomes.append(Committed(step, write(), time.perf_counter() - start_time, num_bytes))
        except BaseException as error:  # ``poll`` raises it again in the training thread
            self._outcomes.append(error)


def _raise(error: Exception) -> list[TensorRecord]:
    raise error
