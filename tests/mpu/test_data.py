"""A batch that one rank has read, on all ranks of its tensor group."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from megatron.mpu.data import broadcast_data
from megatron.mpu.groups import SINGLE, Group
from tests.helpers.harness import run_ranks
from tests.helpers.whole import group_of_all_ranks

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
    return broadcast_data(KEYS, data, torch.int64, group_of_all_ranks(rank, size), CPU)


def test_broadcast_gives_all_ranks_first_rank_data():
    for received in [receive(0, 1), *run_ranks(4, receive, 4)]:
        assert list(received) == KEYS
        for key in KEYS:
            assert torch.equal(received[key], BATCH[key]) and received[key].dtype == torch.int64, key


def test_rejects_wrong_dtype_before_sending():
    with pytest.raises(TypeError, match=r"needs torch.int64 for 'unasked', got torch.float32. Convert it"):
        broadcast_data(["unasked"], BATCH, torch.int64, SINGLE, CPU)


def test_missing_key_error_lists_available_keys():
    with pytest.raises(KeyError, match=r"must contain 'words', got \['none', 'numbers'"):
        broadcast_data(["words"], BATCH, torch.int64, SINGLE, CPU)
    with pytest.raises(KeyError, match="must contain 'words', got None"):
        broadcast_data(["words"], None, torch.int64, SINGLE, CPU)


def test_shapes_use_host_group_and_values_use_device_group(monkeypatch):
    """To read shapes of a device would be to wait for all that it was given before."""
    calls = []
    monkeypatch.setattr(dist, "broadcast", lambda tensor, src, group: calls.append((tensor.device.type, src, group)))
    group, host = (Group((4, 5), 0, handle) for handle in ("the device's", "the host's"))
    received = broadcast_data(KEYS, BATCH, torch.int64, group, torch.device("meta"), host)
    assert calls == [("cpu", 4, "the host's"), ("meta", 4, "the device's")]
    assert all(received[key].shape == BATCH[key].shape and received[key].is_meta for key in KEYS)
