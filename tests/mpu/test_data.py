"""A batch that one rank has read, on all ranks of its tensor group."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from megatron.mpu.data import broadcast_data
from megatron.mpu.groups import SINGLE, Group
from tests.helpers.harness import run_ranks
from tests.helpers.whole import whole_world

CPU = torch.device("cpu")
BATCH = {
    "text": torch.arange(12).view(3, 4),
    "numbers": torch.arange(7) * 100,
    "one": torch.tensor(5),
    "none": torch.zeros(0, 3, dtype=torch.int64),
    "unasked": torch.ones(2),
}
KEYS = ["numbers", "text", "one", "none"]


def receive(rank, size):
    data = dict(BATCH) if rank == 0 else None
    if data is not None:
        data["text"] = data["text"].t().contiguous().t()  # a view of another order
    return broadcast_data(KEYS, data, torch.int64, whole_world(rank, size), CPU)


def test_every_rank_gets_what_the_first_has_read():
    for got in [receive(0, 1), *run_ranks(4, receive, 4)]:
        assert list(got) == KEYS
        for key in KEYS:
            assert torch.equal(got[key], BATCH[key]) and got[key].dtype == torch.int64, key


def test_another_type_is_refused_before_anything_is_sent():
    with pytest.raises(TypeError, match=r"needs torch.int64 for 'unasked', got torch.float32. Convert it"):
        broadcast_data(["unasked"], BATCH, torch.int64, SINGLE, CPU)


def test_a_missing_key_is_named_with_what_is_there():
    with pytest.raises(KeyError, match=r"must hold 'words', got \['none', 'numbers'"):
        broadcast_data(["words"], BATCH, torch.int64, SINGLE, CPU)
    with pytest.raises(KeyError, match="must hold 'words', got None"):
        broadcast_data(["words"], None, torch.int64, SINGLE, CPU)


def test_shapes_are_told_over_the_host_and_numbers_over_the_device(monkeypatch):
    """To read shapes of a device would be to wait for all that it was given before."""
    sent = []
    monkeypatch.setattr(dist, "broadcast", lambda tensor, src, group: sent.append((tensor.device.type, src, group)))
    group, host = (Group((4, 5), 0, handle) for handle in ("the device's", "the host's"))
    got = broadcast_data(KEYS, BATCH, torch.int64, group, torch.device("meta"), host)
    assert sent == [("cpu", 4, "the host's"), ("meta", 4, "the device's")]
    assert all(got[key].shape == BATCH[key].shape and got[key].is_meta for key in KEYS)
