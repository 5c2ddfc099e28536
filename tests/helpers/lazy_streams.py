"""Simulated streams of a device that execute a copy only when another stream waits for it.

``lazy`` makes ``megatron.device`` treat the CPU as a device that overlaps copies with computation. A tensor that is
read before the wait contains ``NOT_YET`` everywhere, so a missing wait changes the loss.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from megatron import device
from megatron.training.batch_iterators import UploadedBatches
from tds.loss_reduction import LossReduction

CPU = torch.device("cpu")
NOT_YET = 1
"""Value of all elements of a tensor before its copy is executed; a valid token id in every vocabulary."""


class LazyStream:
    """A stream that defers copies until its event is waited for."""

    def __init__(self, log: list[str], name: str) -> None:
        self.log, self.name = log, name
        self.kept: list[Callable[[], Any]] = []
        self.depth = 0

    def __enter__(self) -> None:
        self.depth += 1

    def __exit__(self, *error: object) -> None:
        self.depth -= 1

    def record_event(self) -> LazyStream:
        """Return the event after all copies so far, represented by the stream itself."""
        return self

    def wait_event(self, event: LazyStream) -> None:
        """Run the deferred copies of the other stream."""
        self.log.append("wait")
        while event.kept:
            event.kept.pop(0)()


@contextmanager
def lazy(patch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Simulate streams in the block, and yield a log of their actions.

    The entries are "copy" (to the device), "wait" (for the stream of the copies) and "keep for NAME"
    (``Tensor.record_stream`` for the stream NAME).
    """
    log: list[str] = []
    copy_stream, compute_stream = LazyStream(log, "beside"), LazyStream(log, "computing")
    original = torch.Tensor.to

    def to(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if not copy_stream.depth:
            return original(tensor, *args, **kwargs)
        assert kwargs.get("non_blocking"), "the host waits for this copy"
        copy = torch.full_like(tensor, NOT_YET)
        log.append("copy")
        copy_stream.kept.append(lambda: copy.copy_(tensor))
        return copy

    with patch.context() as within:
        within.setattr(device, "can_pin", lambda kind: True)
        within.setattr(device, "_copy_stream", lambda place, use="activations": copy_stream)
        within.setattr(torch.accelerator, "current_stream", lambda place=None: compute_stream)
        within.setattr(torch.Tensor, "to", to)
        within.setattr(torch.Tensor, "record_stream", lambda tensor, stream: log.append(f"keep for {stream.name}"))
        yield log


@contextmanager
def uploading(patch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Like ``lazy``, for whole runs: micro-batches are uploaded on a stream, and reading the loss logs "host waits"."""
    original = LossReduction.read

    def read(agreement: LossReduction, *more: torch.Tensor) -> list[float]:
        log.append("host waits")
        return original(agreement, *more)

    with lazy(patch) as log, patch.context() as within:
        within.setattr("megatron.training.data.TimedBatches", lambda batches: UploadedBatches(batches, CPU))
        within.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
        within.setattr(LossReduction, "read", read)
        yield log
