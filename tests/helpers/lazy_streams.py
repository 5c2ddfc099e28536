"""Streams of a device that is not there: a copy on one of them is done once another one has waited for it, not before.

``lazy`` lets ``megatron.device`` take the CPU for a device that copies beside its computation. A tensor that is read
ahead of the wait holds ``NOT_YET`` everywhere, so that a forgotten wait is another loss.
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
"""What a copy holds until it is there: an id that every vocabulary has."""


class LazyStream:
    """Keeps copies until its event is waited for."""

    def __init__(self, log: list[str], name: str) -> None:
        self.log, self.name = log, name
        self.kept: list[Callable[[], Any]] = []
        self.depth = 0

    def __enter__(self) -> None:
        self.depth += 1

    def __exit__(self, *error: object) -> None:
        self.depth -= 1

    def record_event(self) -> LazyStream:
        """Return what stands for the event behind all copies so far."""
        return self

    def wait_event(self, event: LazyStream) -> None:
        """Let the copies of the other stream be done."""
        self.log.append("wait")
        while event.kept:
            event.kept.pop(0)()


@contextmanager
def lazy(patch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Yield a list of what is done: "copy" to the device, "wait" of its stream, "keep" of a copy's memory for it."""
    log: list[str] = []
    beside, computing = LazyStream(log, "beside"), LazyStream(log, "computing")
    plain = torch.Tensor.to

    def to(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if not beside.depth:
            return plain(tensor, *args, **kwargs)
        assert kwargs.get("non_blocking"), "the host waits for this copy"
        copy = torch.full_like(tensor, NOT_YET)
        log.append("copy")
        beside.kept.append(lambda: copy.copy_(tensor))
        return copy

    with patch.context() as within:
        within.setattr(device, "can_pin", lambda kind: True)
        within.setattr(device, "_copy_stream", lambda place, use="activations": beside)
        within.setattr(torch.accelerator, "current_stream", lambda place=None: computing)
        within.setattr(torch.Tensor, "to", to)
        within.setattr(torch.Tensor, "record_stream", lambda tensor, stream: log.append(f"keep for {stream.name}"))
        yield log


@contextmanager
def uploading(patch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """As ``lazy``, in which all runs here have their data copied so, and "host waits" is a step's one read."""
    plain = LossReduction.read

    def read(agreement: LossReduction, *more: torch.Tensor) -> list[float]:
        log.append("host waits")
        return plain(agreement, *more)

    with lazy(patch) as log, patch.context() as within:
        within.setattr("megatron.training.data.TimedBatches", lambda batches: UploadedBatches(batches, CPU))
        within.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
        within.setattr(LossReduction, "read", read)
        yield log
