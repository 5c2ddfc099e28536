"""An iterator over micro-batches that knows how long the training has waited for them."""

from __future__ import annotations

import time
from collections.abc import Iterable
from types import TracebackType
from typing import Any

from megatron.errors import SampleError, marked


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
