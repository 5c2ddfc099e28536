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
from tds.gradients import (
    GradientBucket,
    choose_bucket_numel,
    contiguous_view,
    make_buckets,
    multiply,
    reduce_gradients,
    reduce_tied_gradients,
)
from tests.helpers.harness import run_ranks
from tests.helpers.toys import Toy, make_engine, preload_zero


def _reduce(rank: int, bucket_bytes: int) -> bool:
    def make(seed: int) -> list[torch.Tensor]:
        torch.manual_seed(seed)
        wide = torch.randn(6, 4, dtype=torch.float64)
        return [torch.randn(5), wide.t(), torch.randn(3, 3).bfloat16(), torch.randn(7), torch.zeros(0), wide[:, 0]]

    gradients = [g.clone() for g in make(rank)]
    gradients[1] = make(rank)[1]
    reduce_gradients(gradients, dist.group.WORLD, 0.25, bucket_bytes)
    expected = [(a + b) * 0.25 for a, b in zip(make(0), make(1), strict=True)]
    return all(torch.equal(got, reference) for got, reference in zip(gradients, expected, strict=True))


def _sum_tied(rank: int) -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    local_gradient = torch.tensor([1.0 + 2**-12, 1.0 + rank])
    for dtype, first in ((None, 2.0 + 2**-11), (torch.bfloat16, 2.0)):
        gradient = local_gradient.clone()
        reduce_tied_gradients([(weight, dist.group.WORLD)], lambda _, g=gradient: g, dtype)
        assert gradient.dtype is torch.float32 and gradient.tolist() == [first, 3.0]


def test_tied_gradients_are_summed_in_requested_dtype() -> None:
    run_ranks(2, _sum_tied)


@pytest.mark.parametrize("bucket_bytes", [1, 40, 2**20])
def test_reduce_gradients_sums_and_scales_in_any_bucket_size(bucket_bytes: int) -> None:
    assert run_ranks(2, _reduce, bucket_bytes) == [True, True]


def test_gradients_without_group_are_only_scaled() -> None:
    gradients = [torch.ones(3), torch.ones(2, dtype=torch.float64)]
    tds.reduce_gradients(gradients, None, 0.5)
    assert all(float(g.sum()) == g.numel() / 2 for g in gradients)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.sampled_from([torch.float32, torch.float64]), st.integers(0, 9)), max_size=12))
def test_buckets_contain_every_gradient_once(specs: list[Any]) -> None:
    gradients = [torch.zeros(size, dtype=dtype) for dtype, size in specs]
    bucket_list = list(make_buckets(gradients, limit=64))
    bucket_ids = [id(g) for bucket in bucket_list for g in bucket]
    assert sorted(bucket_ids) == sorted(id(g) for g in gradients if g.numel())
    for bucket in bucket_list:
        assert len({g.dtype for g in bucket}) == 1
        assert len(bucket) == 1 or sum(g.numel() * g.element_size() for g in bucket) <= 64


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 40), max_size=14), st.integers(1, 500), st.sampled_from([1, 2, 4]))
def test_buckets_are_filled_up_to_limit(numels: list[int], limit: int, width: int) -> None:
    """A run ends where the next item would pass the limit, whatever the items are and however wide their sum is."""
    runs = list(make_buckets(numels, lambda size: width * size, lambda _: torch.float32, limit))
    assert [size for run in runs for size in run] == [size for size in numels if size]
    for run, next_run in zip(runs, [*runs[1:], None], strict=False):
        assert width * sum(run) <= limit or len(run) == 1
        assert next_run is None or width * (sum(run) + next_run[0]) > limit


def test_bucket_limit_is_read_at_call_time(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = [torch.zeros(4) for _ in range(4)]
    assert len(list(make_buckets(tensors))) == 1
    monkeypatch.setattr("tds.gradients.BUCKET_BYTES", 32)
    assert [len(run) for run in make_buckets(tensors)] == [2, 2]


def _reduce_sparse(rank: int) -> int:
    """Return how many sums had started when the last of three gradients was refused."""
    started, start = [], GradientBucket.start_all_reduce
    GradientBucket.start_all_reduce = lambda *args: started.append(start(*args))  # type: ignore[method-assign]
    sparse = torch.eye(2).to_sparse()
    with pytest.raises(ValueError, match="sparse gradients are not supported"):
        reduce_gradients([torch.ones(3), torch.ones(3).double(), sparse], dist.group.WORLD)
    with pytest.raises(ValueError, match="sparse gradients are not supported"):
        start([sparse], dist.group.WORLD)
    return len(started)


def test_sparse_gradients_are_rejected_before_first_all_reduce() -> None:
    assert run_ranks(2, _reduce_sparse) == [0, 0]


def test_sparse_gradients_without_group_are_scaled() -> None:
    sparse = torch.eye(2).to_sparse()
    reduce_gradients([sparse], None, 0.3)
    assert torch.equal(sparse.to_dense(), torch.eye(2) * 0.3)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_factor_is_not_rounded_to_gradient_dtype(dtype: torch.dtype) -> None:
    """torch's kernel for many tensors at once does that on a CPU: a factor of 1/3 would be off by 1e-3."""
    gradient = torch.randn(2000, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).to(dtype)
    for factor in (1 / 3, 0.3, 1.0, torch.tensor(1 / 3, dtype=torch.float64)):
        scaled = [gradient.clone(), gradient[:7].clone(), gradient.new_zeros(0)]
        multiply(scaled, factor)
        wide_dtype = torch.float64 if dtype == torch.float64 else torch.float32
        expected = (gradient.to(wide_dtype) * torch.as_tensor(factor, dtype=wide_dtype)).to(dtype)
        assert torch.equal(scaled[0], expected) and torch.equal(scaled[1], expected[:7])


def _all_reduce_in_buckets(rank: int, world_size: int, dtype: torch.dtype, reduce_dtype: torch.dtype | None) -> bool:
    """Return whether each sum lies where its gradient does, rounded in the type in which it was taken."""
    shapes, factor = ((3, 4), (7,), (), (33, 65), (0, 2)), 1 / 3

    def make_gradients(seed: int) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(seed)
        tensors = [torch.randn(shape, dtype=torch.float64, generator=generator).to(dtype) for shape in shapes]
        return [gradient.t() if gradient.dim() == 2 else gradient for gradient in tensors]

    gradients = make_gradients(rank)
    GradientBucket.start_all_reduce(gradients, dist.group.WORLD, reduce_dtype).wait(factor)
    single = make_gradients(rank)[3].contiguous()
    address = single.data_ptr()
    GradientBucket.start_all_reduce([single], dist.group.WORLD, reduce_dtype).wait(factor)
    expected = []
    for rank_gradients in zip(*map(make_gradients, range(world_size)), strict=True):
        total = rank_gradients[0].to(reduce_dtype or dtype)
        for gradient in rank_gradients[1:]:
            total = total + gradient.to(reduce_dtype or dtype)
        expected.append(total.mul_(factor).to(dtype))
    return (
        all(map(torch.equal, gradients, expected)) and torch.equal(single, expected[3]) and single.data_ptr() == address
    )


@pytest.mark.parametrize("reduce_dtype", [None, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_all_reduce_writes_result_into_gradients(dtype: torch.dtype, reduce_dtype: torch.dtype | None) -> None:
    assert run_ranks(2, _all_reduce_in_buckets, 2, dtype, reduce_dtype) == [True, True]


def test_clip_skips_zero_norm_and_huge_bound() -> None:
    for value, bound in ((0.0, 1.0), (3.0, float("inf"))):
        gradients = [torch.full((4,), value)]
        clip(gradients, global_norm(gradients, [None]), bound)
        assert torch.equal(gradients[0], torch.full((4,), value))


def test_clip_scales_norm_to_bound_and_skips_smaller_norms() -> None:
    for norm, bound, expected in ((4.0, 1.0, 1.0), (4.0, 4.0, 4.0), (4.0, 0.0, 4.0), (4.0, 4.0 + 1e-7, 4.0)):
        gradients = [torch.full((2,), norm / 2), torch.full((2,), norm / 2, dtype=torch.float64)]
        clip(gradients, global_norm(gradients, []), bound)
        assert abs(global_norm(gradients, []).item() - expected) <= 1e-6 * expected
        assert expected != norm or all(torch.equal(g, torch.full_like(g, norm / 2)) for g in gradients), "not touched"


def test_nan_norm_does_not_spread_to_other_gradients() -> None:
    gradients = [torch.ones(2), torch.tensor([torch.nan])]
    clip(gradients, global_norm(gradients, []), 1.0)
    assert torch.equal(gradients[0], torch.ones(2))


def _get_initialize_error(rank: int, extra: dict[str, Any]) -> str:
    toy = Toy("chain", dtype=torch.float32)
    tds.init_distributed("gloo", verbose=False)
    module = tds.PipelineModule(toy.layer_specs(), num_stages=1, loss_fn=toy.loss_fn)
    config = {"train_micro_batch_size_per_gpu": 1, "zero_allow_untested_optimizer": True, **extra}
    with pytest.raises((NotImplementedError, ValueError)) as raised:
        tds.initialize(model=module, optimizer=torch.optim.SGD(module.parameters(), 0.1), config=config)
    return str(raised.value)


def test_zero_stage_2_is_rejected() -> None:
    preload_zero()
    assert "Use 0 or 1" in run_ranks(1, _get_initialize_error, {"zero_optimization": {"stage": 2}})[0]


def _train_without_optimizer(rank: int) -> str:
    toy = Toy("chain")
    engine = make_engine(toy, 1)
    bare = tds.initialize(model=engine.module, config={"train_micro_batch_size_per_gpu": 3})[0]
    assert bare.eval_batch(iter(toy.make_batches()), num_micro_batches=4) is not None
    with pytest.raises(RuntimeError) as raised:
        bare.train_batch(iter(toy.make_batches()))
    return str(raised.value)


def test_engine_without_optimizer_evaluates_and_rejects_training() -> None:
    assert "optimizer" in run_ranks(1, _train_without_optimizer)[0]


def test_one_run_requires_adjacent_tensors() -> None:
    memory = torch.arange(12.0)
    for tensors in ([memory[:4], memory[4:6], memory[6:]], [memory[2:5].view(3, 1), memory[5:7]]):
        run = contiguous_view(tensors)
        assert run is not None and torch.equal(run, torch.cat([tensor.flatten() for tensor in tensors]))
        assert run.data_ptr() == tensors[0].data_ptr()
    non_adjacent = (
        [memory[:4], memory[5:]],
        [memory[4:6], memory[:4]],
        [memory[:4], memory[4:].clone()],
        [memory[::2]],
    )
    assert all(contiguous_view(tensors) is None for tensors in non_adjacent)
    assert contiguous_view([memory.view(3, 4).t(), memory[:0]]) is None


def test_device_bucket_size_grows_with_replicas() -> None:
    host, cuda = torch.device("cpu"), torch.device("cuda")
    assert choose_bucket_numel(host, 512) is None
    assert [choose_bucket_numel(cuda, replicas) for replicas in (2, 40, 64)] == [40_000_000, 40_000_000, 64_000_000]
    assert choose_bucket_numel(host, 2, 7_000_000) == choose_bucket_numel(cuda, 512, 7_000_000) == 7_000_000


def test_bucket_numel_is_respected() -> None:
    weights = [torch.nn.Parameter(torch.zeros(size, dtype=torch.bfloat16)) for size in (6, 4, 3, 9, 1)]
    chunk_order = ChunkOrder(weights, [weights], bucket_numel=10)
    assert [sum(p.numel() for p in bucket) for bucket in chunk_order.all_buckets()] == [10, 7, 6]
    agreed_order = AgreedOrder(None, lambda device: 10)  # type: ignore[arg-type]
    for weight in weights:
        agreed_order.register(weight)
    assert [sum(p.numel() for p in bucket) for bucket in agreed_order.all_buckets()] == [10, 3, 10]


@pytest.mark.parametrize(
    ("section", "expected_numel"), [({}, 0), ({"reduce_bucket_size": 5e8}, 500_000_000), ("auto", 0)]
)
def test_reduce_bucket_size_is_read_from_json(section: Any, expected_numel: int) -> None:
    zero_section = {"reduce_bucket_size": "auto"} if section == "auto" else section
    assert reduce_bucket_size({"zero_optimization": zero_section}) == expected_numel and reduce_bucket_size({}) == 0
