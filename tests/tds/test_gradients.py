"""Sums of gradients over replicas, in any dtype, in buckets."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

import tds
from tds.bucket_reducer import AgreedOrder, ChunkOrder
from tds.engine.pipeline_json import reduce_bucket_size
from tds.grad_norm import clip, global_norm
from tds.gradients import GradientBucket, bucket_numbers, buckets, multiply, one_run, reduce_gradients, sum_tied
from tests.helpers.harness import run_ranks
from tests.helpers.toys import Toy, make_engine, preload_zero


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
    cut = list(buckets(gradients, limit=64))
    held = [id(g) for bucket in cut for g in bucket]
    assert sorted(held) == sorted(id(g) for g in gradients if g.numel())
    for bucket in cut:
        assert len({g.dtype for g in bucket}) == 1
        assert len(bucket) == 1 or sum(g.numel() * g.element_size() for g in bucket) <= 64


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 40), max_size=14), st.integers(1, 500), st.sampled_from([1, 2, 4]))
def test_runs_are_as_long_as_the_bytes_on_the_way_allow(sizes: list[int], limit: int, width: int) -> None:
    """A run ends where the next item would pass the limit, whatever the items are and however wide their sum is."""
    found = list(buckets(sizes, lambda size: width * size, lambda _: torch.float32, limit))
    assert [size for run in found for size in run] == [size for size in sizes if size]
    for run, after in zip(found, [*found[1:], None], strict=False):
        assert width * sum(run) <= limit or len(run) == 1
        assert after is None or width * (sum(run) + after[0]) > limit


def test_the_limit_is_that_of_now_where_none_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = [torch.zeros(4) for _ in range(4)]
    assert len(list(buckets(tensors))) == 1
    monkeypatch.setattr("tds.gradients.BUCKET_BYTES", 32)
    assert [len(run) for run in buckets(tensors)] == [2, 2]


def _refused_sparse(rank: int) -> int:
    """Return how many sums had started when the last of three gradients was refused."""
    started, start = [], GradientBucket.start_all_reduce
    GradientBucket.start_all_reduce = lambda *args: started.append(start(*args))  # type: ignore[method-assign]
    sparse = torch.eye(2).to_sparse()
    with pytest.raises(ValueError, match="sparse gradients are not supported"):
        reduce_gradients([torch.ones(3), torch.ones(3).double(), sparse], dist.group.WORLD)
    with pytest.raises(ValueError, match="sparse gradients are not supported"):
        start([sparse], dist.group.WORLD)
    return len(started)


def test_sparse_gradients_are_refused_ahead_of_the_first_sum() -> None:
    assert run_ranks(2, _refused_sparse) == [0, 0]


def test_sparse_gradients_of_one_replica_are_scaled() -> None:
    sparse = torch.eye(2).to_sparse()
    reduce_gradients([sparse], None, 0.3)
    assert torch.equal(sparse.to_dense(), torch.eye(2) * 0.3)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_factor_is_not_rounded_to_the_16_bits_of_a_gradient(dtype: torch.dtype) -> None:
    """torch's kernel for many tensors at once does that on a CPU: a factor of 1/3 would be off by 1e-3."""
    made = torch.randn(2000, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).to(dtype)
    for factor in (1 / 3, 0.3, 1.0, torch.tensor(1 / 3, dtype=torch.float64)):
        found = [made.clone(), made[:7].clone(), made.new_zeros(0)]
        multiply(found, factor)
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        wanted = (made.to(wide) * torch.as_tensor(factor, dtype=wide)).to(dtype)
        assert torch.equal(found[0], wanted) and torch.equal(found[1], wanted[:7])


def _sums(rank: int, size: int, dtype: torch.dtype, wide: torch.dtype | None) -> bool:
    """Return whether each sum lies where its gradient does, rounded in the type in which it was taken."""
    shapes, factor = ((3, 4), (7,), (), (33, 65), (0, 2)), 1 / 3

    def made(of: int) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(of)
        each = [torch.randn(shape, dtype=torch.float64, generator=generator).to(dtype) for shape in shapes]
        return [gradient.t() if gradient.dim() == 2 else gradient for gradient in each]

    held = made(rank)
    GradientBucket.start_all_reduce(held, dist.group.WORLD, wide).wait(factor)
    alone = made(rank)[3].contiguous()
    place = alone.data_ptr()
    GradientBucket.start_all_reduce([alone], dist.group.WORLD, wide).wait(factor)
    wanted = []
    for of_ranks in zip(*map(made, range(size)), strict=True):
        total = of_ranks[0].to(wide or dtype)
        for gradient in of_ranks[1:]:
            total = total + gradient.to(wide or dtype)
        wanted.append(total.mul_(factor).to(dtype))
    return all(map(torch.equal, held, wanted)) and torch.equal(alone, wanted[3]) and alone.data_ptr() == place


@pytest.mark.parametrize("wide", [None, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_a_sum_comes_where_its_gradients_lie_to_the_bit(dtype: torch.dtype, wide: torch.dtype | None) -> None:
    assert run_ranks(2, _sums, 2, dtype, wide) == [True, True]


def test_norm_zero_and_huge_bound_leave_gradients_alone() -> None:
    for value, bound in ((0.0, 1.0), (3.0, float("inf"))):
        gradients = [torch.full((4,), value)]
        clip(gradients, global_norm(gradients, [None]), bound)
        assert torch.equal(gradients[0], torch.full((4,), value))


def test_clipping_brings_the_norm_to_the_bound_and_leaves_what_is_at_it() -> None:
    for norm, bound, wanted in ((4.0, 1.0, 1.0), (4.0, 4.0, 4.0), (4.0, 0.0, 4.0), (4.0, 4.0 + 1e-7, 4.0)):
        gradients = [torch.full((2,), norm / 2), torch.full((2,), norm / 2, dtype=torch.float64)]
        clip(gradients, global_norm(gradients, []), bound)
        assert abs(global_norm(gradients, []).item() - wanted) <= 1e-6 * wanted
        assert wanted != norm or all(torch.equal(g, torch.full_like(g, norm / 2)) for g in gradients), "not touched"


def test_a_norm_that_is_not_a_number_spreads_to_no_other_gradient() -> None:
    gradients = [torch.ones(2), torch.tensor([torch.nan])]
    clip(gradients, global_norm(gradients, []), 1.0)
    assert torch.equal(gradients[0], torch.ones(2))


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
    assert "Use 0 or 1" in run_ranks(1, _refused, {"zero_optimization": {"stage": 2}})[0]


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


def test_what_lies_apart_is_no_run() -> None:
    memory = torch.arange(12.0)
    for parts in ([memory[:4], memory[4:6], memory[6:]], [memory[2:5].view(3, 1), memory[5:7]]):
        run = one_run(parts)
        assert run is not None and torch.equal(run, torch.cat([part.flatten() for part in parts]))
        assert run.data_ptr() == parts[0].data_ptr()
    apart = ([memory[:4], memory[5:]], [memory[4:6], memory[:4]], [memory[:4], memory[4:].clone()], [memory[::2]])
    assert all(one_run(parts) is None for parts in apart)
    assert one_run([memory.view(3, 4).t(), memory[:0]]) is None


def test_a_bucket_on_a_device_grows_with_the_replicas_and_one_on_a_host_keeps_its_bytes() -> None:
    host, there = torch.device("cpu"), torch.device("cuda")
    assert bucket_numbers(host, 512) is None
    assert [bucket_numbers(there, replicas) for replicas in (2, 40, 64)] == [40_000_000, 40_000_000, 64_000_000]
    assert bucket_numbers(host, 2, 7_000_000) == bucket_numbers(there, 512, 7_000_000) == 7_000_000


def test_buckets_have_the_numbers_that_were_asked_for() -> None:
    weights = [torch.nn.Parameter(torch.zeros(size, dtype=torch.bfloat16)) for size in (6, 4, 3, 9, 1)]
    of_chunks = ChunkOrder(weights, [weights], numbers=10)
    assert [sum(p.numel() for p in bucket) for bucket in of_chunks.every()] == [10, 7, 6]
    agreed = AgreedOrder(None, lambda place: 10)  # type: ignore[arg-type]
    for weight in weights:
        agreed.register(weight)
    assert [sum(p.numel() for p in bucket) for bucket in agreed.every()] == [10, 3, 10]


@pytest.mark.parametrize(("section", "numbers"), [({}, 0), ({"reduce_bucket_size": 5e8}, 500_000_000), ("auto", 0)])
def test_the_json_says_how_many_numbers_a_bucket_has(section: Any, numbers: int) -> None:
    given = {"reduce_bucket_size": "auto"} if section == "auto" else section
    assert reduce_bucket_size({"zero_optimization": given}) == numbers and reduce_bucket_size({}) == 0
