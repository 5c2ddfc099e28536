"""Simulated streams of a device that execute a copy only when another stream waits for it.

``simulate_streams`` makes ``megatron.device`` treat the CPU as a device that overlaps copies with computation. A tensor
that is read before the wait contains ``UNCOPIED`` everywhere, so a missing wait changes the loss.
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
UNCOPIED = 1
"""Value of all elements of a tensor before its copy is executed; a valid token id in every vocabulary."""


class LazyStream:
    """A stream that defers copies until its event is waited for."""

    def __init__(self, log: list[str], name: str) -> None:
        self.log, self.name = log, name
        self.deferred_copies: list[Callable[[], Any]] = []
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
        while event.deferred_copies:
            event.deferred_copies.pop(0)()


@contextmanager
def simulate_streams(patch: pytest.MonkeyPatch) -> Iterator[list[str]]:
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
        copy = torch.full_like(tensor, UNCOPIED)
        log.append("copy")
        copy_stream.deferred_copies.append(lambda: copy.copy_(tensor))
        return copy

    with patch.context() as patches:
        patches.setattr(device, "can_pin", lambda device_type: True)
        patches.setattr(device, "_copy_stream", lambda device_, use="activations": copy_stream)
        patches.setattr(torch.accelerator, "current_stream", lambda device_=None: compute_stream)
        patches.setattr(torch.Tensor, "to", to)
        patches.setattr(torch.Tensor, "record_stream", lambda tensor, stream: log.append(f"keep for {stream.name}"))
        yield log


@contextmanager
def simulate_uploads(patch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """``simulate_streams`` for full runs: a stream uploads micro-batches, and reading the loss logs "host waits"."""
    original = LossReduction.read

    def read(reduction: LossReduction, *tensors: torch.Tensor) -> list[float]:
        log.append("host waits")
        return original(reduction, *tensors)

    with simulate_streams(patch) as log, patch.context() as patches:
        patches.setattr("megatron.training.data.TimedBatches", lambda batches: UploadedBatches(batches, CPU))
        patches.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
        patches.setattr(LossReduction, "read", read)
        yield log
