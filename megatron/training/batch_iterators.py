"""Iterators over micro-batches: one measures the time waited for data, one copies to the device ahead of use."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from types import TracebackType
from typing import Any

import torch

from megatron import device
from megatron.errors import SampleError, marked
from megatron.mpu.data import Upload
from megatron.runtime import rank_status


class TimedBatches:
    """Gives what ``source`` gives; as a context it ends the processes that read ahead when the training has ended.

    When the training dies they end with this process instead: nothing must keep it from leaving.

    Raises:
        DataError: as ``source``; it is of this rank, since other replicas read other samples.
    """

    def __init__(self, source: Iterable[Any]) -> None:
        self.source = source
        self._waited_s = 0.0
        with marked(is_of_this_rank=True):
            self._batches = iter(source)

    def __iter__(self) -> TimedBatches:
        return self

    def __next__(self) -> Any:
        start = time.perf_counter()
        try:
            with marked(is_of_this_rank=True):
                return next(self._batches)
        finally:
            self._waited_s += time.perf_counter() - start

    def drain_waited_s(self) -> float:
        """Return the seconds spent waiting since the last call."""
        waited, self._waited_s = self._waited_s, 0.0
        return waited

    def __enter__(self) -> TimedBatches:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None and hasattr(self._batches, "close"):
            self._batches.close()
            return
        raised = error.__cause__ if isinstance(error, SampleError) else error  # torch tells of a death wherever we are
        if isinstance(raised, RuntimeError) and hasattr(self._batches, "explained"):
            explained = self._batches.explained(raised)
            if explained is not raised:
                raise explained from error


class UploadedBatches(TimedBatches):
    """Also has what ``source`` gives copied to ``place``, and reads one micro-batch ahead where it is told to.

    What was read ahead and is never asked for is as if it had not been read: the samples that a run has consumed are
    counted by steps. So is an error of it.
    """

    def __init__(self, source: Iterable[Mapping[str, torch.Tensor]], place: torch.device) -> None:
        super().__init__(source)
        self._place = place
        self._ahead: Upload | None = None
        self._error: Exception | None = None

    def __next__(self) -> Upload:
        error, self._error = self._error, None
        if error is not None:
            raise error
        ahead, self._ahead = self._ahead, None
        return self._upload() if ahead is None else ahead

    def read_ahead(self) -> None:
        """Read the next micro-batch and start its copies, for a moment in which the device has work.

        Nothing has waited for it where the device still has work when that is done. What goes wrong is raised when the
        micro-batch is asked for.
        """
        if self._ahead is not None or self._error is not None:
            return
        waited_s, at = self._waited_s, rank_status.heartbeat_now() or ""
        rank_status.heartbeat_note(f"{at}, reading ahead" if at else "reading ahead")
        try:
            self._ahead = self._upload()
        except Exception as error:
            self._error = error
        rank_status.heartbeat_note(at)
        if device.is_busy(self._place):
            self._waited_s = waited_s

    def _upload(self) -> Upload:
        return Upload(super().__next__(), self._place)
