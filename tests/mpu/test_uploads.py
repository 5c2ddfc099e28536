"""Copies of a micro-batch on a stream of their own: the device waits for them, and they are those of what was read."""

from __future__ import annotations

import copy

import pytest
import torch

from megatron.mpu.data import Upload, broadcast_data
from megatron.mpu.groups import SINGLE
from tests.helpers.lazy_streams import UNCOPIED, simulate_streams

CPU = torch.device("cpu")


def read_batch() -> dict[str, torch.Tensor]:
    return {"text": torch.arange(10, 22).view(3, 4), "more": torch.arange(7, 9)}


def broadcast_tensor(batch: Upload, name: str = "text") -> torch.Tensor:
    return broadcast_data([name], batch, torch.int64, SINGLE, CPU)[name]


def test_copies_start_immediately_and_are_awaited_on_use(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with simulate_streams(monkeypatch) as log:
        batch = Upload(read_batch(), CPU)
        assert log == ["copy", "copy"]
        assert torch.all(batch._copies["text"] == UNCOPIED), "nobody has waited"
        assert torch.equal(broadcast_tensor(batch), read_batch()["text"])
        assert torch.equal(broadcast_tensor(copy.copy(batch), "more"), read_batch()["more"])
        assert log == ["copy", "copy", "wait", "keep for computing", "keep for computing"]
        assert broadcast_tensor(batch) is batch._copies["text"] is not batch["text"]


def test_upload_behaves_like_source_dict_and_tracks_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    with simulate_streams(monkeypatch):
        batch = Upload(read_batch(), CPU)
        assert isinstance(batch, dict) and list(batch) == ["text", "more"]
        assert all(torch.equal(tensor, read_batch()[name]) for name, tensor in batch.items())
        assert broadcast_tensor(batch, "more").tolist() == [7, 8]
        batch["text"] = batch["text"][:, :2]
        batch["more"][0] = 5
        batch["added"] = torch.tensor([3])
        assert torch.equal(broadcast_tensor(batch), read_batch()["text"][:, :2])
        assert broadcast_tensor(batch, "more").tolist() == [5, 8] and broadcast_tensor(batch, "added").tolist() == [3]


def test_without_streams_copies_are_synchronous(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[object] = []
    original_to = torch.Tensor.to
    monkeypatch.setattr(
        torch.Tensor,
        "to",
        lambda tensor, *to_args, **kwargs: calls.append((to_args, kwargs)) or original_to(tensor, *to_args),
    )
    batch = Upload(read_batch(), CPU)
    assert calls == [((CPU,), {})] * 2, "a copy that nobody awaits must be done"
    assert torch.equal(broadcast_tensor(batch), read_batch()["text"])


@pytest.mark.gpu(only="copies beside a computation")
def test_cuda_receives_complete_batches_while_computing() -> None:
    device = torch.device("cuda", torch.accelerator.current_device_index())
    work = torch.randn(4096, 4096, device=device)
    totals, retained = [], []
    for batch_idx in range(64):
        batch = Upload({"text": torch.full((512, 512), batch_idx).pin_memory()}, device)
        work = (work @ work).clamp(-1, 1)
        text = broadcast_data(["text"], batch, torch.int64, SINGLE, device)["text"]
        totals.append(text.sum())
        retained.append(batch if batch_idx % 2 else None)  # the memory of others is given to later uploads
    assert [int(total) for total in totals] == [batch_idx * 512 * 512 for batch_idx in range(64)]
