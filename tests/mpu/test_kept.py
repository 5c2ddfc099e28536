"""Where inputs wait: slices, buffers and their slots, and tensors that several runs share."""

from __future__ import annotations

import gc

import pytest
import torch

from megatron import device
from megatron.mpu.activation_storage import ActivationOffload, ActivationStorage
from megatron.mpu.random import DropoutStreams, checkpoint
from tests.helpers.harness import run_ranks
from tests.helpers.whole import random, whole_world


def leaf(seed: int, *shape: int) -> torch.Tensor:
    return random(seed, *shape).requires_grad_()


def test_inputs_come_as_they_are_and_then_from_where_they_wait():
    x, mask = leaf(0, 3, 5), torch.ones(3, dtype=torch.bool)
    inputs = ActivationStorage(ActivationOffload(is_on_host=True)).put_away((x, mask, None, 7))
    assert inputs.take()[0] is x
    again, other, *rest = inputs.take()
    assert torch.equal(again, x) and again.requires_grad and again.data_ptr() != x.data_ptr()
    assert other is mask and rest == [None, 7]


def parts(rank: int, size: int, numel: int) -> tuple[int, bool]:
    x = leaf(1, numel)
    keeper = ActivationStorage(ActivationOffload(is_partitioned=True, group=whole_world(rank, size)))
    inputs = keeper.put_away((x,))
    inputs.take()
    return keeper.waiting_bytes() // 8, torch.equal(inputs.take()[0], x)


def test_a_rank_keeps_its_part_also_where_parts_are_not_even():
    for numel, held in ((12, 4), (13, 5), (2, 1)):
        assert run_ranks(3, parts, 3, numel) == [(held, True)] * 3


def test_all_slots_lie_in_one_buffer_and_are_used_again():
    keeper = ActivationStorage(ActivationOffload(is_contiguous=True), lambda: (3, 1))
    for _ in range(2):
        waiting = [keeper.put_away((leaf(i, 4),)) for i in range(3)]
        storages = {each._places[0].held.untyped_storage().data_ptr() for each in waiting}
        assert len(storages) == 1 and keeper.buffer_bytes() == keeper.waiting_bytes() == 3 * 4 * 8
        for seed, each in enumerate(waiting):
            each.take()
            assert torch.equal(each.take()[0], leaf(seed, 4))
        del waiting, each
        gc.collect()
        assert keeper.waiting_bytes() == 0


def test_a_buffer_that_is_too_small_grows_and_says_so(capsys):
    keeper = ActivationStorage(ActivationOffload(is_contiguous=True), lambda: (2, 1))
    waiting = [keeper.put_away((leaf(i, 4),)) for i in range(3)]
    assert "--contigious-checkpointing: all 2 slots of a buffer are used" in capsys.readouterr().err
    assert keeper.buffer_bytes() == 2 * keeper.waiting_bytes() * 2 // 3
    for seed, each in enumerate(waiting):
        each.take()
        assert torch.equal(each.take()[0], leaf(seed, 4))


def test_inputs_of_another_size_give_back_the_buffers_in_which_nothing_waits():
    keeper = ActivationStorage(ActivationOffload(is_contiguous=True), lambda: (2, 1))
    waiting = [keeper.put_away((leaf(0, 4), leaf(1, 7)))]
    for numel in range(10, 20):
        other = keeper.put_away((leaf(numel, numel),))
        assert keeper.buffer_bytes() == (2 * 4 + 7 + 2 * numel) * 8, "the one in use stays"
        del other
    waiting[0].take()
    assert torch.equal(waiting[0].take()[0], leaf(0, 4))
    waiting.clear()
    keeper.put_away((leaf(0, 5),))
    assert keeper.buffer_bytes() == 2 * 5 * 8


@pytest.mark.parametrize("how", [ActivationOffload(is_on_host=True), ActivationOffload(is_contiguous=True)])
def test_what_several_runs_read_is_put_away_once(how):
    keeper, shared = ActivationStorage(how, lambda: (2, 1)), leaf(9, 8)
    waiting = [keeper.put_away((leaf(i, 4), shared)) for i in range(2)]
    assert keeper.waiting_bytes() == (2 * 4 + 8) * 8
    assert torch.equal([each.take() and each.take() for each in waiting][1][1], shared)


def test_the_memory_of_the_host_is_what_the_device_gives(monkeypatch):
    made = []
    memory = device.host_memory
    monkeypatch.setattr(device, "host_memory", lambda *how: made.append(memory(*how)) or made[-1])
    keeper = ActivationStorage(ActivationOffload(is_on_host=True, is_contiguous=True), lambda: (5, 1))
    keeper.put_away((leaf(0, 4),))
    assert [tuple(each.shape) for each in made] == [(5, 4)]


@pytest.mark.parametrize("how", [ActivationOffload(is_on_host=True), ActivationOffload(is_contiguous=True)])
def test_a_graph_that_is_kept_is_run_again_as_often_as_it_is_asked(how):
    weight, x = leaf(3, 4, 4), leaf(4, 4)
    y = checkpoint(
        DropoutStreams(), lambda x: torch.tanh(weight @ torch.tanh(x)), x, keeper=ActivationStorage(how)
    ).sum()
    found = [torch.autograd.grad(y, (weight, x), retain_graph=True) for _ in range(3)]
    wanted = torch.autograd.grad(torch.tanh(weight @ torch.tanh(x)).sum(), (weight, x))
    assert all(torch.equal(a, b) for each in found for a, b in zip(each, wanted, strict=True))
