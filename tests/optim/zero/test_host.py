"""Copies from a device to the CPU: all are started first, then there is one wait."""

from __future__ import annotations

import pytest
import torch

from megatron.optim import offload
from megatron.optim.offload import OffloadConfig


def test_cpu_tensors_are_not_copied() -> None:
    tensors = [torch.ones(2), torch.ones(3)]
    assert all(copied is original for copied, original in zip(OffloadConfig().copies(tensors), tensors, strict=True))


def test_copies_are_synchronized_once_after_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device "meta" represents the CPU, and the CPU represents a device."""
    events: list[object] = []
    original_copy = torch.Tensor.copy_

    def record_copy(self: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        events.append(("copy", tuple(source.shape), non_blocking))
        return original_copy(self, source)

    monkeypatch.setattr(offload, "HOST", torch.device("meta"))
    monkeypatch.setattr(
        offload.device, "finish_copies", lambda waited_device: events.append(("wait", waited_device.type))
    )
    monkeypatch.setattr(torch.Tensor, "copy_", record_copy)
    copies = OffloadConfig(is_pinned=False).copies([torch.ones(2), torch.ones(3, dtype=torch.bfloat16)])
    assert events == [("copy", (2,), True), ("copy", (3,), True), ("wait", "cpu")]
    assert [(copied.device.type, copied.dtype) for copied in copies] == [
        ("meta", torch.float32),
        ("meta", torch.bfloat16),
    ]
