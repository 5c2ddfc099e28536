"""What goes to the CPU from a device: started together, and waited for once, behind all of it."""

from __future__ import annotations

import pytest
import torch

from megatron.optim import offload
from megatron.optim.offload import OffloadConfig


def test_what_lies_on_the_cpu_is_not_copied() -> None:
    tensors = [torch.ones(2), torch.ones(3)]
    assert all(one is other for one, other in zip(OffloadConfig().copies(tensors), tensors, strict=True))


def test_copies_are_waited_for_once_behind_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """With "meta" in the place of the CPU, and the CPU in that of a device."""
    events: list[object] = []
    plain = torch.Tensor.copy_

    def copy(self: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        events.append(("copy", tuple(source.shape), non_blocking))
        return plain(self, source)

    monkeypatch.setattr(offload, "HOST", torch.device("meta"))
    monkeypatch.setattr(offload.device, "finish_copies", lambda place: events.append(("wait", place.type)))
    monkeypatch.setattr(torch.Tensor, "copy_", copy)
    made = OffloadConfig(is_pinned=False).copies([torch.ones(2), torch.ones(3, dtype=torch.bfloat16)])
    assert events == [("copy", (2,), True), ("copy", (3,), True), ("wait", "cpu")]
    assert [(each.device.type, each.dtype) for each in made] == [("meta", torch.float32), ("meta", torch.bfloat16)]
