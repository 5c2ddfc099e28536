"""Sums of gradients over replicas, in any dtype, in buckets."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

import tds
from tds.gradients import buckets, clip, global_norm, reduce_gradients, sum_tied
from tests.harness import run_ranks
from tests.tds.toys import Toy, make_engine, preload_zero


def _reduce(rank: int, bucket_bytes: int) -> bool:
    def make(seed: int) -> list[torch.Tensor]:
        torch.manual_seed(seed)
        wide = torch.randn(6, 4, dtype=torch.float64)
        return [torch.randn(5), wide.t(), torch.randn(3, 3).bfloat16(), torch.randn(7), torch.zeros(0), wide[:, 0]]

    mine = [g.clone() for g in make(rank)]
    mine[1] = make(rank)[1]
    reduce_gradients(mine, dist.group.WORLD, 0.25, bucket_bytes)
    wanted = [(a + b) * 0.25 for a, b in zip(make(0), make(1), strict=True)]
    return all(torch.equal(got, want) for got, want in zip(mine, wanted, strict=True))


def _sum_tied(rank: int) -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    own = torch.tensor([1.0 + 2**-12, 1.0 + rank])
    for dtype, first in ((None, 2.0 + 2**-11), (torch.bfloat16, 2.0)):
        gradient = own.clone()
        sum_tied([(weight, dist.group.WORLD)], lambda _, g=gradient: g, dtype)
        assert gradient.dtype is torch.float32 and gradient.tolist() == [first, 3.0]


def test_copies_of_a_tied_weight_are_added_up_in_the_type_that_is_asked_for() -> None:
    run_ranks(2, _sum_tied)


@pytest.mark.parametrize("bucket_bytes", [1, 40, 2**20])
def test_sum_over_two_ranks_times_scale_in_any_bucket_size(bucket_bytes: int) -> None:
    assert run_ranks(2, _reduce, bucket_bytes) == [True, True]


def test_without_a_group_gradients_are_only_scaled() -> None:
    gradients = [torch.ones(3), torch.ones(2, dtype=torch.float64)]
    tds.reduce_gradients(gradients, None, 0.5)
    assert all(float(g.sum()) == g.numel() / 2 for g in gradients)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.sampled_from([torch.float32, torch.float64]), st.integers(0, 9)), max_size=12))
def test_buckets_hold_every_gradient_once_in_order(sizes: list[Any]) -> None:
    gradients = [torch.zeros(size, dtype=dtype) for dtype, size in sizes]
    cut = list(buckets(gradients, 64))
    held = [id(g) for bucket in cut for g in bucket]
    assert sorted(held) == sorted(id(g) for g in gradients if g.numel())
    for bucket in cut:
        assert len({g.dtype for g in bucket}) == 1
        assert len(bucket) == 1 or sum(g.numel() * g.element_size() for g in bucket) <= 64


def test_sparse_gradients_are_refused() -> None:
    with pytest.raises(ValueError, match="sparse"):
        list(buckets([torch.zeros(2, 2).to_sparse()], 64))


def test_norm_zero_and_huge_bound_leave_gradients_alone() -> None:
    for value, bound in ((0.0, 1.0), (3.0, float("inf"))):
        gradients = [torch.full((4,), value)]
        clip(gradients, global_norm(gradients, None, torch.device("cpu")), bound)
        assert torch.equal(gradients[0], torch.full((4,), value))


def _refused(rank: int, extra: dict[str, Any]) -> str:
    toy = Toy("chain", dtype=torch.float32)
    tds.init_distributed("gloo", verbose=False)
    module = tds.PipelineModule(toy.specs(), num_stages=1, loss_fn=toy.loss_fn)
    config = {"train_micro_batch_size_per_gpu": 1, "zero_allow_untested_optimizer": True, **extra}
    with pytest.raises((NotImplementedError, ValueError)) as raised:
        tds.initialize(model=module, optimizer=torch.optim.SGD(module.parameters(), 0.1), config=config)
    return str(raised.value)


def test_zero_beyond_stage_1_is_refused() -> None:
    preload_zero()
    assert "use 0 or 1" in run_ranks(1, _refused, {"zero_optimization": {"stage": 2}})[0]


def _without_optimizer(rank: int) -> str:
    toy = Toy("chain")
    engine = make_engine(toy, 1)
    bare = tds.initialize(model=engine.module, config={"train_micro_batch_size_per_gpu": 3})[0]
    assert bare.eval_batch(iter(toy.batches()), num_micro_batches=4) is not None
    with pytest.raises(RuntimeError) as raised:
        bare.train_batch(iter(toy.batches()))
    return str(raised.value)


def test_an_engine_without_optimizer_only_evaluates() -> None:
    assert "optimizer" in run_ranks(1, _without_optimizer)[0]
