"""Copies of a micro-batch on a stream of their own: the device waits for them, and they are those of what was read."""

from __future__ import annotations

import copy

import pytest
import torch

from megatron.mpu.data import Upload, broadcast_data
from megatron.mpu.groups import SINGLE
from tests.helpers.lazy_streams import NOT_YET, lazy

CPU = torch.device("cpu")


def read() -> dict[str, torch.Tensor]:
    return {"text": torch.arange(10, 22).view(3, 4), "more": torch.arange(7, 9)}


def given(batch: Upload, name: str = "text") -> torch.Tensor:
    return broadcast_data([name], batch, torch.int64, SINGLE, CPU)[name]


def test_copies_start_at_once_and_the_device_waits_for_them_when_they_are_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with lazy(monkeypatch) as log:
        batch = Upload(read(), CPU)
        assert log == ["copy", "copy"]
        assert torch.all(batch._copies["text"] == NOT_YET), "nobody has waited"
        assert torch.equal(given(batch), read()["text"])
        assert torch.equal(given(copy.copy(batch), "more"), read()["more"])
        assert log == ["copy", "copy", "wait", "keep for computing", "keep for computing"]
        assert given(batch) is batch._copies["text"] is not batch["text"]


def test_to_a_program_it_is_what_was_read_and_its_changes_count(monkeypatch: pytest.MonkeyPatch) -> None:
    with lazy(monkeypatch):
        batch = Upload(read(), CPU)
        assert isinstance(batch, dict) and list(batch) == ["text", "more"]
        assert all(torch.equal(tensor, read()[name]) for name, tensor in batch.items())
        assert given(batch, "more").tolist() == [7, 8]
        batch["text"] = batch["text"][:, :2]
        batch["more"][0] = 5
        batch["added"] = torch.tensor([3])
        assert torch.equal(given(batch), read()["text"][:, :2])
        assert given(batch, "more").tolist() == [5, 8] and given(batch, "added").tolist() == [3]


def test_without_streams_the_copies_are_plain_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []
    plain = torch.Tensor.to
    monkeypatch.setattr(torch.Tensor, "to", lambda tensor, *to, **how: asked.append((to, how)) or plain(tensor, *to))
    batch = Upload(read(), CPU)
    assert asked == [((CPU,), {})] * 2, "a copy that nobody awaits must be done"
    assert torch.equal(given(batch), read()["text"])


@pytest.mark.gpu(only="copies beside a computation")
def test_cuda_gets_every_micro_batch_whole_while_it_computes() -> None:
    place = torch.device("cuda", torch.accelerator.current_device_index())
    work = torch.randn(4096, 4096, device=place)
    sums, held = [], []
    for number in range(64):
        batch = Upload({"text": torch.full((512, 512), number).pin_memory()}, place)
        work = (work @ work).clamp(-1, 1)
        text = broadcast_data(["text"], batch, torch.int64, SINGLE, place)["text"]
        sums.append(text.sum())
        held.append(batch if number % 2 else None)  # the memory of others is given to later uploads
    assert [int(each) for each in sums] == [number * 512 * 512 for number in range(64)]
