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
from tests.helpers.alive import Alive
from tests.helpers.harness import RankFailure, run_ranks
from tests.helpers.zero_parts import Model, loss_of, make, take_step, tokens_of
from tests.optim.zero.test_cuts import parameters, parts_of

STEPS = 4
BYTES = 3000
"""Of a bucket: the model has several, and one weight that is larger."""


def order_of(weights: list[nn.Parameter]) -> AgreedOrder:
    """Return the order of one process, which agrees with nobody."""
    order = AgreedOrder(None)  # type: ignore[arg-type]
    for weight in weights:
        order.register(weight)
    return order


def leave(weight: nn.Parameter, gradient: torch.Tensor) -> None:
    weight.grad = gradient.clone()


@settings(max_examples=60, deadline=None)
@given(st.lists(parameters(), min_size=1, max_size=4), st.integers(2, 9))
def test_each_replica_finds_its_part_of_the_sum_of_micro_batches_in_one_run(weights: Any, replicas: int) -> None:
    wanted = [torch.arange(1.0, w.numel() + 1).view(w.shape) for w in weights]
    for replica in range(replicas):
        group = Group(tuple(range(replicas)), replica)
        buffer = GradBuffer(order_of(weights), group, lambda w: partition_of(w, replicas))
        for _ in range(2):
            for weight, gradient in zip(weights, wanted, strict=True):
                leave(weight, gradient)
                buffer.add(weight)
                assert weight.grad is None
        for weight, gradient in zip(weights, wanted, strict=True):
            cut, part = partition_of(weight, replicas), buffer.main_grad(weight)
            expected = gradient if cut is None else parts_of(cut, gradient)[replica]
            assert torch.equal(part, 2 * expected) and part.is_contiguous()


@settings(max_examples=20, deadline=None)
@given(st.lists(parameters(), min_size=1, max_size=4), st.integers(2, 5), st.booleans())
@example([nn.Parameter(torch.zeros(6, 4)), nn.Parameter(torch.zeros(3, 4))], 2, True)
def test_a_product_adds_what_its_gradient_would(weights: Any, replicas: int, is_cut: bool) -> None:
    """To slots it does so part by part, which lie apart."""
    matrices = [weight for weight in weights if weight.dim() == 2]
    generator = torch.Generator().manual_seed(0)
    for replica in range(replicas):
        group = Group(tuple(range(replicas)), replica)
        cut = (lambda w: partition_of(w, replicas)) if is_cut else None
        by_product, by_gradient = (GradBuffer(order_of(weights), group, cut) for _ in range(2))
        for _ in range(2):
            for weight in matrices:
                rows, inputs = (torch.randn(3, size, generator=generator) for size in weight.shape)
                by_product.add_product(weight, rows, inputs)
                leave(weight, rows.t() @ inputs)
                by_gradient.add(weight)
        for weight in weights:
            torch.testing.assert_close(by_product.main_grad(weight), by_gradient.main_grad(weight))


def test_a_product_behind_the_sum_is_refused() -> None:
    weight = nn.Parameter(torch.zeros(4, 4))
    buffer = GradBuffer(order_of([weight]), Group((0, 1), 0), lambda w: partition_of(w, 2))
    buffer.add_product(weight, torch.ones(2, 4), torch.ones(2, 4))
    buffer._bucket_of(weight)._is_summed = True
    with pytest.raises(RuntimeError, match="once, got another one of shape .4, 4. after its reduction"):
        buffer.add_product(weight, torch.ones(2, 4), torch.ones(2, 4))


def test_plain_gradients_lie_one_behind_the_other_and_those_that_do_not_come_are_zero() -> None:
    weights = [nn.Parameter(torch.zeros(shape, dtype=torch.bfloat16)) for shape in ((3, 5), (7,), (), (0, 2), (4, 4))]
    buffer = GradBuffer(order_of(weights), Group((0, 1), 0))
    for step in range(2):
        for weight in weights[::2]:
            leave(weight, torch.full_like(weight, 1.0 + step))
            buffer.add(weight)
        found = [buffer.main_grad(weight) for weight in weights if weight.numel()]
        run = gradients.one_run(found)
        assert run is not None and run.dtype == torch.float32
        assert run.tolist() == [1.0 + step] * 15 + [0.0] * 7 + [1.0 + step] * 17
        assert buffer.main_grad(weights[3]).shape == (0, 2)
        buffer.clear()


def test_a_weight_alone_in_its_bucket_lends_it_the_memory_of_its_gradient() -> None:
    weight = nn.Parameter(torch.zeros(64, 32))
    for own_cut in (None, lambda w: partition_of(w, 4)):
        buffer = GradBuffer(order_of([weight]), Group((0, 1, 2, 3), 1), own_cut)
        weight.grad = torch.randn(64, 32)
        memory = weight.grad.data_ptr()
        wanted = weight.grad.clone()
        buffer.add(weight)
        part = buffer.main_grad(weight)
        assert torch.equal(part, wanted if own_cut is None else wanted[16:32])
        assert part.data_ptr() == memory + (0 if own_cut is None else 16 * 32 * 4)


def test_a_column_sharded_weight_alone_in_its_bucket_is_copied_part_by_part() -> None:
    """The replicas cut it along its columns, so that the memory of its gradient is in another order than the slots."""
    weight = set_shard(nn.Parameter(torch.zeros(6, 32)), Shard((6, 64), 1, 0, 32))
    wanted = torch.arange(6.0 * 32).view(6, 32)
    for replica in range(2):
        buffer = GradBuffer(order_of([weight]), Group((0, 1), replica), lambda w: partition_of(w, 2))
        leave(weight, wanted)
        buffer.add(weight)
        assert torch.equal(buffer.main_grad(weight), wanted[:, 16 * replica : 16 * replica + 16])


def test_a_frozen_weight_moves_the_others_together() -> None:
    weights = [nn.Parameter(torch.zeros(4)) for _ in range(3)]

    class Trained(AgreedOrder):
        def every(self) -> Any:
            return [[w for w in weights if w.requires_grad]]

    buffer = GradBuffer(Trained(None), Group((0, 1), 0))  # type: ignore[arg-type]
    for frozen in (None, 1, None):
        for number, weight in enumerate(weights):
            weight.requires_grad_(number != frozen)
        found = [buffer.main_grad(weight) for weight in weights if weight.requires_grad]
        assert gradients.one_run(found) is not None
        assert frozen is None or buffer.main_grad(weights[frozen]).eq(0).all()
        buffer.clear()


# Trained with sums of either kind.

KINDS: dict[str, dict[str, Any]] = {
    "fp64, clipped": {"dtype": torch.float64, "clip_grad": 0.5},
    "fp16, which overflows at first": {"dtype": torch.float16},
    "bf16, recomputed": {"dtype": torch.bfloat16, "recomputes": True},
}


def both_ways(rank: int, size: int, gas: int) -> dict[str, Any]:
    """Train under ZeRO 1 with all-reduced and with reduce-scattered sums.

    Returns:
        by kind the largest difference of a weight and of a norm, whether steps were skipped alike, and how many.
    """
    grid = build_grid(Topology.of_world(size, tensor=1, pipe=1), rank)
    gradients.BUCKET_BYTES = BYTES
    found = {}
    for kind, how in KINDS.items():
        sides = []
        for way in (False, True):
            scaler = None
            if how["dtype"] is torch.float16:
                scaler = GradScaler(scale=2.0**13, is_dynamic=True, hysteresis=1, window=50)
            grad_buffer.SCATTERS = way
            sides.append(make(grid, 1, overlap_grad_reduce=True, scaler=scaler, **how))
        assert [optimizer.reducer.shard_group.size > 1 for _, optimizer in sides] == [False, True]
        worst, norms, alike, skipped = 0.0, 0.0, True, 0
        for step in range(STEPS):
            for module, optimizer in sides:
                optimizer.policy.accepts_step = (lambda norm: False) if step == 2 else None
                take_step(module, optimizer, grid, step, gas)
            (plain, a), (module, b) = sides
            alike = alike and (a.overflow, a.was_refused, a.loss_scale) == (b.overflow, b.was_refused, b.loss_scale)
            skipped += b.overflow
            if not b.overflow:
                norms = max(norms, abs(a.grad_norm / b.grad_norm - 1.0))
            for mine, other in zip(plain.parameters(), module.parameters(), strict=True):
                worst = max(worst, (mine - other).abs().max().item())
        found[kind] = worst, norms, alike, skipped
        words = module.words.weight
        assert not torch.equal(words, Model().words.weight.to(words.dtype))
    return found


@pytest.mark.parametrize(("size", "gas"), [(3, 2), pytest.param(2, 1, marks=pytest.mark.slow)])
def test_reduce_scattered_sums_train_as_whole_ones(size: int, gas: int) -> None:
    for found in run_ranks(size, both_ways, size, gas):
        worst, norms, alike, _ = found["fp64, clipped"]
        assert worst <= 1e-13 and norms <= 1e-13 and alike
        for kind in ("fp16, which overflows at first", "bf16, recomputed"):
            worst, norms, alike, skipped = found[kind]
            assert worst <= 2e-2 and norms <= 1e-2 and alike, kind
            assert (skipped > 0) == kind.startswith("fp16")


def after_the_sum(rank: int) -> None:
    """Add to a gradient whose reduce-scatter has started."""
    grid = build_grid(Topology.of_world(2, tensor=1, pipe=1), rank)
    grad_buffer.SCATTERS = True
    module, optimizer = make(grid, 1, overlap_grad_reduce=True)
    optimizer.begin_last_backward()
    loss_of(module, tokens_of(rank, 0, 0)).backward()
    optimizer.end_micro_batch()
    loss_of(module, tokens_of(rank, 0, 1)).backward()


def test_a_gradient_that_comes_behind_its_reduce_scatter_is_refused() -> None:
    with pytest.raises(RankFailure, match="after its reduction .* had started.*--no-overlap-grad-reduce"):
        run_ranks(2, after_the_sum)


# Bytes: held while a step runs, and sent.


def held_in_a_step(rank: int, scatters: bool) -> tuple[int, int]:
    """Return the most bytes that backward and sums hold at a time, and those of all gradients.

    gloo copies what it scatters, so nothing is sent there.
    """
    if scatters:
        setattr(dist, name_of("reduce_scatter_single"), lambda *_, **__: Done())
    grid = build_grid(Topology.of_world(2, tensor=1, pipe=1), rank)
    grad_buffer.SCATTERS = scatters
    gradients.BUCKET_BYTES = 2**14
    weights = [nn.Parameter(torch.zeros(32, 32)) for _ in range(32)]
    store = ParamStore(grid.data, zero_stage=1)
    reducer = OverlappedGradReducer(store)
    for weight in weights:
        store.register(weight, torch.float32)
        reducer.register(weight)
    with Alive("cpu") as alive:
        reducer.begin_last_backward()
        sum(weight.square().sum() for weight in weights).backward()
        reducer.end_micro_batch()
        reducer.finish(1.0)
    whole = sum(weight.nbytes for weight in weights)
    return alive.peak - whole, whole  # the weights are seen, too, when autograd is asked whether it comes to them


@pytest.mark.parametrize("scatters", [False, True])
def test_there_is_no_second_copy_of_the_gradients(scatters: bool) -> None:
    for peak, whole in run_ranks(2, held_in_a_step, scatters):
        assert whole <= peak <= 1.3 * whole, "the gradients, a bucket that is not full, and what autograd works in"


class Sent:
    """Stands for the collectives of one rank of NCCL: writes down the bytes that a ring puts on each rank's wire."""

    def __init__(self, replicas: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.replicas, self.bytes = replicas, {"all_reduce": 0.0, "reduce_scatter": 0.0, "all_gather": 0.0}
        monkeypatch.setattr(dist, "get_backend", lambda group=None: "nccl")
        monkeypatch.setattr(dist, "all_reduce", self._noting("all_reduce", 2, lambda x, *_: x.nbytes))
        for name in ("reduce_scatter", "all_gather"):
            whole: Callable[..., int] = lambda one, two, *_: max(one.nbytes, two.nbytes)  # noqa: E731
            monkeypatch.setattr(dist, name_of(f"{name}_single"), self._noting(name, 1, whole))

    def _noting(self, name: str, passes: int, whole: Callable[..., int]) -> Callable[..., Any]:
        def call(*tensors: Any, **how: Any) -> Any:
            self.bytes[name] += passes * (self.replicas - 1) / self.replicas * whole(*tensors)
            return Done()

        return call


class Done:
    def wait(self) -> None: ...


def step_bytes(replicas: int, dtype: torch.dtype, *, scatters: bool, monkeypatch: pytest.MonkeyPatch) -> Sent:
    """Return what the second step of ZeRO 1 sends; in the first one replicas agree on the order of buckets."""
    monkeypatch.setattr(grad_buffer, "SCATTERS", scatters)
    grid = build_grid(Topology(1, 1, 1), 0)
    module = nn.Sequential(*[nn.Sequential(nn.Linear(128, 512), nn.Linear(512, 128)) for _ in range(2)])
    with monkeypatch.context() as patch:
        sent = Sent(replicas, patch)
        data = Group(tuple(range(replicas)), 0, object())
        optimizer = main_params_optimizer(module, data, dtype)
        for _ in range(2):
            sent.bytes = dict.fromkeys(sent.bytes, 0.0)
            optimizer.begin_last_backward()
            module(torch.randn(2, 128, dtype=dtype)).float().square().sum().backward()
            optimizer.end_micro_batch()
            optimizer.finish_gradient_sums()
            optimizer.step()
    assert grid.data.size == 1
    return sent


def main_params_optimizer(module: nn.Module, data: Group, dtype: torch.dtype) -> Any:
    optimizer = build_optimizer(module.parameters(), dtype=dtype, data=data, zero_stage=1, overlap_grad_reduce=True)
    optimizer.norm_of_sums = lambda: torch.tensor(1.0, dtype=torch.float64)  # type: ignore[method-assign]
    return optimizer


@pytest.mark.parametrize("replicas", [4, 8])
def test_zero_1_sends_each_gradient_once_in_place_of_twice(replicas: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In bf16: 4 + 2 bytes of a parameter for 8 + 2."""
    numbers = 2 * (2 * 128 * 512 + 512 + 128)
    share = (replicas - 1) / replicas
    before = step_bytes(replicas, torch.bfloat16, scatters=False, monkeypatch=monkeypatch).bytes
    after = step_bytes(replicas, torch.bfloat16, scatters=True, monkeypatch=monkeypatch).bytes
    assert before == {"all_reduce": share * 8 * numbers, "reduce_scatter": 0, "all_gather": before["all_gather"]}
    assert after["all_reduce"] == 0
    assert share * 4 * numbers <= after["reduce_scatter"] <= 1.01 * share * 4 * numbers
    assert after["all_gather"] == before["all_gather"] <= 1.01 * share * 2 * numbers
    assert after["reduce_scatter"] <= 0.51 * before["all_reduce"]
    assert sum(after.values()) <= 0.61 * sum(before.values())
