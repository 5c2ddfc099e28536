"""Where inputs wait: slices, buffers and their slots, and tensors that several runs share."""

from __future__ import annotations

import gc

import pytest
import torch

from megatron import device
from megatron.mpu.activation_storage import ActivationOffload, ActivationStorage
from megatron.mpu.random import DropoutStreams, checkpoint
from tests.helpers.harness import run_ranks
from tests.helpers.whole import group_of_all_ranks, random_tensor


def make_leaf(seed: int, *shape: int) -> torch.Tensor:
    return random_tensor(seed, *shape).requires_grad_()


def test_inputs_are_restored_from_storage_on_second_read():
    x, mask = make_leaf(0, 3, 5), torch.ones(3, dtype=torch.bool)
    inputs = ActivationStorage(ActivationOffload(is_on_host=True)).store((x, mask, None, 7))
    assert inputs.restore()[0] is x
    restored, restored_mask, *others = inputs.restore()
    assert torch.equal(restored, x) and restored.requires_grad and restored.data_ptr() != x.data_ptr()
    assert restored_mask is mask and others == [None, 7]


def run_partitioned(rank: int, size: int, numel: int) -> tuple[int, bool]:
    x = make_leaf(1, numel)
    storage = ActivationStorage(ActivationOffload(is_partitioned=True, group=group_of_all_ranks(rank, size)))
    inputs = storage.store((x,))
    inputs.restore()
    return storage.stored_bytes() // 8, torch.equal(inputs.restore()[0], x)


def test_partitioned_inputs_support_uneven_shards():
    for numel, num_stored in ((12, 4), (13, 5), (2, 1)):
        assert run_ranks(3, run_partitioned, 3, numel) == [(num_stored, True)] * 3


def test_slots_share_one_reused_buffer():
    storage = ActivationStorage(ActivationOffload(is_contiguous=True), lambda: (3, 1))
    for _ in range(2):
        stored_inputs = [storage.store((make_leaf(i, 4),)) for i in range(3)]
        storages = {stored._stored[0].storage.untyped_storage().data_ptr() for stored in stored_inputs}
        assert len(storages) == 1 and storage.buffer_bytes() == storage.stored_bytes() == 3 * 4 * 8
        for seed, stored in enumerate(stored_inputs):
            stored.restore()
            assert torch.equal(stored.restore()[0], make_leaf(seed, 4))
        del stored_inputs, stored
        gc.collect()
        assert storage.stored_bytes() == 0


def test_full_buffer_grows_and_warns(capsys):
    storage = ActivationStorage(ActivationOffload(is_contiguous=True), lambda: (2, 1))
    stored_inputs = [storage.store((make_leaf(i, 4),)) for i in range(3)]
    assert "--contigious-checkpointing: all 2 slots of a buffer are used" in capsys.readouterr().err
    assert storage.buffer_bytes() == 2 * storage.stored_bytes() * 2 // 3
    for seed, stored in enumerate(stored_inputs):
        stored.restore()
        assert torch.equal(stored.restore()[0], make_leaf(seed, 4))


def test_new_input_size_frees_unused_buffers():
    storage = ActivationStorage(ActivationOffload(is_contiguous=True), lambda: (2, 1))
    stored_inputs = [storage.store((make_leaf(0, 4), make_leaf(1, 7)))]
    for numel in range(10, 20):
        other = storage.store((make_leaf(numel, numel),))
        assert storage.buffer_bytes() == (2 * 4 + 7 + 2 * numel) * 8, "the one in use stays"
        del other
    stored_inputs[0].restore()
    assert torch.equal(stored_inputs[0].restore()[0], make_leaf(0, 4))
    stored_inputs.clear()
    storage.store((make_leaf(0, 5),))
    assert storage.buffer_bytes() == 2 * 5 * 8


@pytest.mark.parametrize("offload", [ActivationOffload(is_on_host=True), ActivationOffload(is_contiguous=True)])
def test_shared_input_is_stored_once(offload):
    storage, shared = ActivationStorage(offload, lambda: (2, 1)), make_leaf(9, 8)
    stored_inputs = [storage.store((make_leaf(i, 4), shared)) for i in range(2)]
    assert storage.stored_bytes() == (2 * 4 + 8) * 8
    assert torch.equal([stored.restore() and stored.restore() for stored in stored_inputs][1][1], shared)


def test_host_storage_uses_device_host_memory(monkeypatch):
    buffers = []
    original_host_memory = device.host_memory
    monkeypatch.setattr(
        device, "host_memory", lambda *alloc_args: buffers.append(original_host_memory(*alloc_args)) or buffers[-1]
    )
    storage = ActivationStorage(ActivationOffload(is_on_host=True, is_contiguous=True), lambda: (5, 1))
    storage.store((make_leaf(0, 4),))
    assert [tuple(buffer.shape) for buffer in buffers] == [(5, 4)]


@pytest.mark.parametrize("offload", [ActivationOffload(is_on_host=True), ActivationOffload(is_contiguous=True)])
def test_retained_graph_recomputes_on_every_backward(offload):
    weight, x = make_leaf(3, 4, 4), make_leaf(4, 4)
    y = checkpoint(
        DropoutStreams(), lambda x: torch.tanh(weight @ torch.tanh(x)), x, storage=ActivationStorage(offload)
    ).sum()
    grads = [torch.autograd.grad(y, (weight, x), retain_graph=True) for _ in range(3)]
    expected = torch.autograd.grad(torch.tanh(weight @ torch.tanh(x)).sum(), (weight, x))
    assert all(torch.equal(a, b) for actual in grads for a, b in zip(actual, expected, strict=True))
