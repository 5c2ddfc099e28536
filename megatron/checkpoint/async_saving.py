"""AsyncSaver: stage the tensors on the host, then write and commit in a background thread.

The save itself is ``saving.save``, with the same bytes and the same commit; it only runs later. So a kill at any
moment leaves the older checkpoints as they are. One save is under way at a time: the next ``start`` waits for it.
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
from typing import Any

import torch.distributed as dist

from megatron.checkpoint.retention import RetentionPolicy
from megatron.checkpoint.saving import check_keep, save_from
from megatron.checkpoint.staging_buffer import StagingBuffer
from megatron.checkpoint.tensor_record import TensorRecord
from megatron.mpu.groups import Group

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
