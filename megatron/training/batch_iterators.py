"""Iterators over micro-batches: one measures the time spent waiting for data, one copies to the device in advance."""

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
    """Iterates over ``source`` and measures the wait. As a context manager, closes workers when training has ended.

    After an error the workers are not closed; they exit together with this process, so that nothing delays its exit.

    Raises:
        DataError: raised by ``source``; attributed to this rank, because other replicas read other samples.
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
        """Return the waiting time since the last call, in seconds."""
        waited, self._waited_s = self._waited_s, 0.0
        return waited

    def __enter__(self) -> TimedBatches:
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None and hasattr(self._batches, "close"):
            self._batches.close()
            return
        # Torch raises the error for a dead worker at an arbitrary line of the block, not only while it waits for data.
        raised = error.__cause__ if isinstance(error, SampleError) else error
        if isinstance(raised, RuntimeError) and hasattr(self._batches, "explained"):
            explained = self._batches.explained(raised)
            if explained is not raised:
                raise explained from error


class UploadedBatches(TimedBatches):
    """Copies the micro-batches to ``torch_device`` and, on request, prefetches one micro-batch.

    A prefetched micro-batch that is never used does not count as consumed, since consumed samples are counted by steps.
    Likewise, an error in it is never raised.

    Args:
        torch_device: the device.
    """

    def __init__(self, source: Iterable[Mapping[str, torch.Tensor]], torch_device: torch.device) -> None:
        super().__init__(source)
        self._device = torch_device
        self._prefetched: Upload | None = None
        self._prefetch_error: Exception | None = None

    def __next__(self) -> Upload:
        error, self._prefetch_error = self._prefetch_error, None
        if error is not None:
            raise error
        prefetched, self._prefetched = self._prefetched, None
        return self._upload() if prefetched is None else prefetched

    def read_ahead(self) -> None:
        """Read the next micro-batch and start its copies; to be called while the device is busy.

        The time does not count as waiting if the device is still busy afterwards. An error is raised when the
        micro-batch is requested.
        """
        if self._prefetched is not None or self._prefetch_error is not None:
            return
        waited_s, operation = self._waited_s, rank_status.current_operation() or ""
        rank_status.write_operation(f"{operation}, reading ahead" if operation else "reading ahead")
        try:
            self._prefetched = self._upload()
        except Exception as error:
            self._prefetch_error = error
        rank_status.write_operation(operation)
        if device.is_busy(self._device):
            self._waited_s = waited_s

    def _upload(self) -> Upload:
        """Read the next micro-batch and start its copies to the device."""
        return Upload(super().__next__(), self._device)
