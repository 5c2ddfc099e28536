"""Gradients in contiguous buckets: sums in place, reduce-scattered ones beside whole ones, bytes held and sent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn

from megatron.mpu.groups import Group, build_grid
from megatron.mpu.shard import Shard, set_shard
from megatron.mpu.topology import Topology
from megatron.optim import GradScaler, build_optimizer
from megatron.optim.gradients import buffer as grad_buffer
from megatron.optim.gradients.buffer import GradBuffer
from megatron.optim.gradients.overlapped import OverlappedGradReducer
from megatron.optim.param_store import ParamStore
from megatron.optim.zero.partition import partition_of
from megatron.torch_compat import name_of
from tds import gradients
from tds.bucket_reducer import AgreedOrder
from tests.helpers.alive import LiveMemoryTracker
from tests.helpers.harness import RankFailure, run_ranks
from tests.helpers.zero_parts import Model, compute_loss, make_model_and_optimizer, make_tokens, take_step
from tests.optim.zero.test_cuts import parameters, shards_of

STEPS = 4
BUCKET_BYTES = 3000
"""Of a bucket: the model has several, and one weight that is larger."""


def make_order(weights: list[nn.Parameter]) -> AgreedOrder:
    """Return the order of one process, which agrees with nobody."""
    order = AgreedOrder(None)  # type: ignore[arg-type]
    for weight in weights:
        order.register(weight)
    return order


def set_gradient(weight: nn.Parameter, gradient: torch.Tensor) -> None:
    weight.grad = gradient.clone()


@settings(max_examples=60, deadline=None)
@given(st.lists(parameters(), min_size=1, max_size=4), st.integers(2, 9))
def test_replica_gets_contiguous_shard_of_summed_micro_batches(weights: Any, replicas: int) -> None:
    full_grads = [torch.arange(1.0, w.numel() + 1).view(w.shape) for w in weights]
    for replica in range(replicas):
        group = Group(tuple(range(replicas)), replica)
        buffer = GradBuffer(make_order(weights), group, lambda w: partition_of(w, replicas))
        for _ in range(2):
            for weight, gradient in zip(weights, full_grads, strict=True):
                set_gradient(weight, gradient)
                buffer.add(weight)
                assert weight.grad is None
        for weight, gradient in zip(weights, full_grads, strict=True):
            partition, local_grad = partition_of(weight, replicas), buffer.main_grad(weight)
            expected = gradient if partition is None else shards_of(partition, gradient)[replica]
            assert torch.equal(local_grad, 2 * expected) and local_grad.is_contiguous()


@settings(max_examples=20, deadline=None)
@given(st.lists(parameters(), min_size=1, max_size=4), st.integers(2, 5), st.booleans())
@example([nn.Parameter(torch.zeros(6, 4)), nn.Parameter(torch.zeros(3, 4))], 2, True)
def test_add_product_equals_adding_gradient(weights: Any, replicas: int, is_sharded: bool) -> None:
    """To slots it does so part by part, which lie apart."""
    matrices = [weight for weight in weights if weight.dim() == 2]
    generator = torch.Generator().manual_seed(0)
    for replica in range(replicas):
        group = Group(tuple(range(replicas)), replica)
        partition = (lambda w: partition_of(w, replicas)) if is_sharded else None
        by_product, by_gradient = (GradBuffer(make_order(weights), group, partition) for _ in range(2))
        for _ in range(2):
            for weight in matrices:
                rows, inputs = (torch.randn(3, size, generator=generator) for size in weight.shape)
                by_product.add_product(weight, rows, inputs)
                set_gradient(weight, rows.t() @ inputs)
                by_gradient.add(weight)
        for weight in weights:
            torch.testing.assert_close(by_product.main_grad(weight), by_gradient.main_grad(weight))


def test_product_after_reduction_is_rejected() -> None:
    weight = nn.Parameter(torch.zeros(4, 4))
    buffer = GradBuffer(make_order([weight]), Group((0, 1), 0), lambda w: partition_of(w, 2))
    buffer.add_product(weight, torch.ones(2, 4), torch.ones(2, 4))
    buffer._bucket_of(weight)._is_summed = True
    with pytest.raises(RuntimeError, match="once, got another one of shape .4, 4. after its reduction"):
        buffer.add_product(weight, torch.ones(2, 4), torch.ones(2, 4))


def test_gradients_are_contiguous_and_missing_ones_are_zero() -> None:
    weights = [nn.Parameter(torch.zeros(shape, dtype=torch.bfloat16)) for shape in ((3, 5), (7,), (), (0, 2), (4, 4))]
    buffer = GradBuffer(make_order(weights), Group((0, 1), 0))
    for step in range(2):
        for weight in weights[::2]:
            set_gradient(weight, torch.full_like(weight, 1.0 + step))
            buffer.add(weight)
        grads = [buffer.main_grad(weight) for weight in weights if weight.numel()]
        flat_grads = gradients.contiguous_view(grads)
        assert flat_grads is not None and flat_grads.dtype == torch.float32
        assert flat_grads.tolist() == [1.0 + step] * 15 + [0.0] * 7 + [1.0 + step] * 17
        assert buffer.main_grad(weights[3]).shape == (0, 2)
        buffer.clear()


def test_single_weight_bucket_reuses_gradient_memory() -> None:
    weight = nn.Parameter(torch.zeros(64, 32))
    for partition in (None, lambda w: partition_of(w, 4)):
        buffer = GradBuffer(make_order([weight]), Group((0, 1, 2, 3), 1), partition)
        weight.grad = torch.randn(64, 32)
        address = weight.grad.data_ptr()
        expected = weight.grad.clone()
        buffer.add(weight)
        local_grad = buffer.main_grad(weight)
        assert torch.equal(local_grad, expected if partition is None else expected[16:32])
        assert local_grad.data_ptr() == address + (0 if partition is None else 16 * 32 * 4)


def test_column_sharded_weight_in_single_bucket_is_copied() -> None:
    """The replicas cut it along its columns, so that the memory of its gradient is in another order than the slots."""
    weight = set_shard(nn.Parameter(torch.zeros(6, 32)), Shard((6, 64), 1, 0, 32))
    expected = torch.arange(6.0 * 32).view(6, 32)
    for replica in range(2):
        buffer = GradBuffer(make_order([weight]), Group((0, 1), replica), lambda w: partition_of(w, 2))
        set_gradient(weight, expected)
        buffer.add(weight)
        assert torch.equal(buffer.main_grad(weight), expected[:, 16 * replica : 16 * replica + 16])


def test_frozen_weight_keeps_other_gradients_contiguous() -> None:
    weights = [nn.Parameter(torch.zeros(4)) for _ in range(3)]

    class Trained(AgreedOrder):
        def all_buckets(self) -> Any:
            return [[w for w in weights if w.requires_grad]]

    buffer = GradBuffer(Trained(None), Group((0, 1), 0))  # type: ignore[arg-type]
    for frozen_idx in (None, 1, None):
        for weight_idx, weight in enumerate(weights):
            weight.requires_grad_(weight_idx != frozen_idx)
        grads = [buffer.main_grad(weight) for weight in weights if weight.requires_grad]
        assert gradients.contiguous_view(grads) is not None
        assert frozen_idx is None or buffer.main_grad(weights[frozen_idx]).eq(0).all()
        buffer.clear()


# Trained with sums of either kind.

PRECISIONS: dict[str, dict[str, Any]] = {
    "fp64, clipped": {"dtype": torch.float64, "clip_grad": 0.5},
    "fp16, which overflows at first": {"dtype": torch.float16},
    "bf16, recomputed": {"dtype": torch.bfloat16, "recompute": True},
}


def compare_reductions(rank: int, size: int, gas: int) -> dict[str, Any]:
    """Train under ZeRO 1 with all-reduced and with reduce-scattered sums.

    Returns:
        by kind the largest difference of a weight and of a norm, whether steps were skipped alike, and how many.
    """
    grid = build_grid(Topology.from_world_size(size, tensor=1, pipe=1), rank)
    gradients.BUCKET_BYTES = BUCKET_BYTES
    results = {}
    for precision, options in PRECISIONS.items():
        runs = []
        for is_scattered in (False, True):
            scaler = None
            if options["dtype"] is torch.float16:
                scaler = GradScaler(scale=2.0**13, is_dynamic=True, hysteresis=1, window=50)
            grad_buffer.USE_REDUCE_SCATTER = is_scattered
            runs.append(make_model_and_optimizer(grid, 1, overlap_grad_reduce=True, scaler=scaler, **options))
        assert [optimizer.reducer.shard_group.size > 1 for _, optimizer in runs] == [False, True]
        max_weight_diff, max_norm_diff, is_same, num_skipped = 0.0, 0.0, True, 0
        for step in range(STEPS):
            for scattered_module, optimizer in runs:
                optimizer.policy.accepts_step = (lambda norm: False) if step == 2 else None
                take_step(scattered_module, optimizer, grid, step, gas)
            (plain_module, plain_optimizer), (scattered_module, scattered_optimizer) = runs
            is_same = is_same and (
                plain_optimizer.overflow,
                plain_optimizer.was_rejected,
                plain_optimizer.loss_scale,
            ) == (scattered_optimizer.overflow, scattered_optimizer.was_rejected, scattered_optimizer.loss_scale)
            num_skipped += scattered_optimizer.overflow
            if not scattered_optimizer.overflow:
                max_norm_diff = max(max_norm_diff, abs(plain_optimizer.grad_norm / scattered_optimizer.grad_norm - 1.0))
            for plain_weight, scattered_weight in zip(
                plain_module.parameters(), scattered_module.parameters(), strict=True
            ):
                max_weight_diff = max(max_weight_diff, (plain_weight - scattered_weight).abs().max().item())
        results[precision] = max_weight_diff, max_norm_diff, is_same, num_skipped
        words = scattered_module.words.weight
        assert not torch.equal(words, Model().words.weight.to(words.dtype))
    return results


@pytest.mark.parametrize(("size", "gas"), [(3, 2), pytest.param(2, 1, marks=pytest.mark.slow)])
def test_reduce_scatter_trains_like_all_reduce(size: int, gas: int) -> None:
    for result in run_ranks(size, compare_reductions, size, gas):
        max_weight_diff, max_norm_diff, is_same, _ = result["fp64, clipped"]
        assert max_weight_diff <= 1e-13 and max_norm_diff <= 1e-13 and is_same
        for precision in ("fp16, which overflows at first", "bf16, recomputed"):
            max_weight_diff, max_norm_diff, is_same, num_skipped = result[precision]
            assert max_weight_diff <= 2e-2 and max_norm_diff <= 1e-2 and is_same, precision
            assert (num_skipped > 0) == precision.startswith("fp16")


def accumulate_after_reduce_scatter(rank: int) -> None:
    """Add to a gradient whose reduce-scatter has started."""
    grid = build_grid(Topology.from_world_size(2, tensor=1, pipe=1), rank)
    grad_buffer.USE_REDUCE_SCATTER = True
    module, optimizer = make_model_and_optimizer(grid, 1, overlap_grad_reduce=True)
    optimizer.begin_last_backward()
    compute_loss(module, make_tokens(rank, 0, 0)).backward()
    optimizer.end_micro_batch()
    compute_loss(module, make_tokens(rank, 0, 1)).backward()


def test_gradient_after_reduce_scatter_is_rejected() -> None:
    with pytest.raises(RankFailure, match="after its reduction .* had started.*--no-overlap-grad-reduce"):
        run_ranks(2, accumulate_after_reduce_scatter)


# Bytes: held while a step runs, and sent.


def measure_step_bytes(rank: int, scatters: bool) -> tuple[int, int]:
    """Return the most bytes that backward and sums hold at a time, and those of all gradients.

    gloo copies what it scatters, so nothing is sent there.
    """
    if scatters:
        setattr(dist, name_of("reduce_scatter_single"), lambda *_, **__: CompletedWork())
    grid = build_grid(Topology.from_world_size(2, tensor=1, pipe=1), rank)
    grad_buffer.USE_REDUCE_SCATTER = scatters
    gradients.BUCKET_BYTES = 2**14
    weights = [nn.Parameter(torch.zeros(32, 32)) for _ in range(32)]
    store = ParamStore(grid.data, zero_stage=1)
    reducer = OverlappedGradReducer(store)
    for weight in weights:
        store.register(weight, torch.float32)
        reducer.register(weight)
    with LiveMemoryTracker("cpu") as alive:
        reducer.begin_last_backward()
        sum(weight.square().sum() for weight in weights).backward()
        reducer.end_micro_batch()
        reducer.finish(1.0)
    grad_bytes = sum(weight.nbytes for weight in weights)
    return (
        alive.peak_bytes - grad_bytes,
        grad_bytes,
    )  # the weights are seen, too, when autograd is asked whether it comes to them


@pytest.mark.parametrize("scatters", [False, True])
def test_no_second_copy_of_gradients_is_allocated(scatters: bool) -> None:
    for peak, grad_bytes in run_ranks(2, measure_step_bytes, scatters):
        assert grad_bytes <= peak <= 1.3 * grad_bytes, (
            "the gradients, a bucket that is not full, and what autograd works in"
        )


class CollectiveBytes:
    """Stands for the collectives of one rank of NCCL: writes down the bytes that a ring puts on each rank's wire."""

    def __init__(self, replicas: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.replicas, self.bytes = replicas, {"all_reduce": 0.0, "reduce_scatter": 0.0, "all_gather": 0.0}
        monkeypatch.setattr(dist, "get_backend", lambda group=None: "nccl")
        monkeypatch.setattr(dist, "all_reduce", self._counted("all_reduce", 2, lambda x, *_: x.nbytes))
        for name in ("reduce_scatter", "all_gather"):
            larger_bytes: Callable[..., int] = lambda first, second, *_: max(first.nbytes, second.nbytes)  # noqa: E731
            monkeypatch.setattr(dist, name_of(f"{name}_single"), self._counted(name, 1, larger_bytes))

    def _counted(self, name: str, passes: int, count_bytes: Callable[..., int]) -> Callable[..., Any]:
        def call(*tensors: Any, **kwargs: Any) -> Any:
            self.bytes[name] += passes * (self.replicas - 1) / self.replicas * count_bytes(*tensors)
            return CompletedWork()

        return call


class CompletedWork:
    def wait(self) -> None: ...


def step_bytes(
    replicas: int, dtype: torch.dtype, *, scatters: bool, monkeypatch: pytest.MonkeyPatch
) -> CollectiveBytes:
    """Return what the second step of ZeRO 1 sends; in the first one replicas agree on the order of buckets."""
    monkeypatch.setattr(grad_buffer, "USE_REDUCE_SCATTER", scatters)
    grid = build_grid(Topology(1, 1, 1), 0)
    module = nn.Sequential(*[nn.Sequential(nn.Linear(128, 512), nn.Linear(512, 128)) for _ in range(2)])
    with monkeypatch.context() as patch:
        traffic = CollectiveBytes(replicas, patch)
        data = Group(tuple(range(replicas)), 0, object())
        optimizer = main_params_optimizer(module, data, dtype)
        for _ in range(2):
            traffic.bytes = dict.fromkeys(traffic.bytes, 0.0)
            optimizer.begin_last_backward()
            module(torch.randn(2, 128, dtype=dtype)).float().square().sum().backward()
            optimizer.end_micro_batch()
            optimizer.finish_gradient_sums()
            optimizer.step()
    assert grid.data.size == 1
    return traffic


def main_params_optimizer(module: nn.Module, data: Group, dtype: torch.dtype) -> Any:
    optimizer = build_optimizer(module.parameters(), dtype=dtype, data=data, zero_stage=1, overlap_grad_reduce=True)
    optimizer.norm_of_sums = lambda: torch.tensor(1.0, dtype=torch.float64)  # type: ignore[method-assign]
    return optimizer


@pytest.mark.parametrize("replicas", [4, 8])
def test_zero_1_sends_each_gradient_once_instead_of_twice(replicas: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In bf16: 4 + 2 bytes of a parameter for 8 + 2."""
    num_params = 2 * (2 * 128 * 512 + 512 + 128)
    ring_fraction = (replicas - 1) / replicas
    all_reduce_bytes = step_bytes(replicas, torch.bfloat16, scatters=False, monkeypatch=monkeypatch).bytes
    scatter_bytes = step_bytes(replicas, torch.bfloat16, scatters=True, monkeypatch=monkeypatch).bytes
    assert all_reduce_bytes == {
        "all_reduce": ring_fraction * 8 * num_params,
        "reduce_scatter": 0,
        "all_gather": all_reduce_bytes["all_gather"],
    }
    assert scatter_bytes["all_reduce"] == 0
    assert ring_fraction * 4 * num_params <= scatter_bytes["reduce_scatter"] <= 1.01 * ring_fraction * 4 * num_params
    assert scatter_bytes["all_gather"] == all_reduce_bytes["all_gather"] <= 1.01 * ring_fraction * 2 * num_params
    assert scatter_bytes["reduce_scatter"] <= 0.51 * all_reduce_bytes["all_reduce"]
    assert sum(scatter_bytes.values()) <= 0.61 * sum(all_reduce_bytes.values())
