"""Sums over replicas that run beside the backward are the same sums, started in one order everywhere."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import tds
from tds.bucket_reducer import BucketReducer, ChunkOrder
from tds.deepspeed.optimizers import Gradients
from tds.gradients import GradientBucket, reduce_gradients
from tds.pipe import LayerSpec, PipelineModule
from tests.helpers.harness import run_ranks
from tests.helpers.toys import Dense, Toy, make_engine, preload_zero, train_batch


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(4, 4) for _ in range(6)])


class Unused(nn.Module):
    """Passes its input on and has the parameters of a layer that would not."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 4))
        self.bias = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def _chunks(model: nn.Sequential, num_chunks: int) -> list[list[nn.Parameter]]:
    size = len(model) // num_chunks
    return [list(model[i * size : (i + 1) * size].parameters()) for i in range(num_chunks)]


def _make_reducer(
    model: nn.Sequential,
    num_chunks: int = 1,
    tied: Sequence[nn.Parameter] = (),
    bucket_bytes: int | None = None,
    **kwargs: Any,
) -> BucketReducer:
    gradients = Gradients(torch.optim.SGD(model.parameters(), lr=0.1))
    order = ChunkOrder(model.parameters(), _chunks(model, num_chunks), tied, bucket_bytes)
    return BucketReducer(order, gradients.gradient_of, dist.group.WORLD, **kwargs)


def _loss(model: nn.Module, rank: int) -> torch.Tensor:
    return model(torch.randn(3, 4, generator=torch.Generator().manual_seed(rank))).square().sum()


def _reduce(
    rank: int, num_chunks: int, has_tied: bool, unused_layer: int | None, starts_early: bool = True
) -> tuple[list[int], list[torch.Tensor]]:
    """Return (how many buckets had started when each layer's weight got its gradient, the gradients).

    Without ``starts_early`` their number behind the whole backward is the last one.
    """
    model, plain = _model(), _model()
    if unused_layer is not None and rank == 0:
        model[unused_layer], plain[unused_layer] = Unused(), Unused()
    reducer = _make_reducer(
        model, num_chunks, [model[0].weight] if has_tied else [], bucket_bytes=80, starts_early=starts_early
    )
    started: list[int] = []
    start = GradientBucket.start_all_reduce

    def count_start(*args: Any) -> Any:
        count_start.number += 1  # type: ignore[attr-defined]
        return start(*args)

    count_start.number = 0  # type: ignore[attr-defined]
    GradientBucket.start_all_reduce = count_start  # type: ignore[method-assign]
    try:
        for layer in model:
            layer.weight.register_post_accumulate_grad_hook(lambda _: started.append(count_start.number))  # type: ignore[attr-defined]
        with reducer.last_backward(0):
            _loss(model, rank).backward()
        for chunk in range(num_chunks):
            reducer.register_chunk_ready(chunk)
        if not starts_early:
            started.append(count_start.number)  # type: ignore[attr-defined]
        reducer.finish(0.5)
    finally:
        GradientBucket.start_all_reduce = start  # type: ignore[method-assign]
    _loss(plain, rank).backward()
    expected = [torch.zeros_like(p) if p.grad is None else p.grad for p in plain.parameters()]
    reduce_gradients(expected, dist.group.WORLD, 0.5)
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), expected, strict=True))
    return started, expected


@pytest.mark.parametrize("has_tied", [False, True])
def test_all_reduces_start_during_backward(has_tied: bool) -> None:
    for started, _ in run_ranks(2, _reduce, 1, has_tied, None):
        assert started == sorted(started) and started[-1] >= 4, started


def test_all_reduces_may_start_after_backward() -> None:
    for started, _ in run_ranks(2, _reduce, 1, False, None, False):
        assert set(started) == {0}


def test_late_chunks_delay_following_buckets() -> None:
    for started, _ in run_ranks(2, _reduce, 2, False, None):
        assert set(started) == {0}, "chunk 1 goes first on every replica, and is not ready in this backward"


def test_missing_gradient_on_one_replica_keeps_bucket_order() -> None:
    for unused_layer in (0, 3, 5):
        run_ranks(2, _reduce, 1, False, unused_layer)


def test_reducer_resets_between_batches() -> None:
    def reduce_twice(rank: int) -> None:
        model = _model()
        reducer = _make_reducer(model)
        for _ in range(2):
            model.zero_grad()
            with reducer.last_backward(0):
                _loss(model, rank).backward()
            reducer.register_chunk_ready(0)
            reducer.finish(1.0)
        expected = sum(_gradient(r) for r in range(2))
        assert torch.allclose(model[0].weight.grad, expected, atol=1e-6)

    run_ranks(2, reduce_twice)


def _gradient(rank: int) -> torch.Tensor:
    model = _model()
    _loss(model, rank).backward()
    return model[0].weight.grad


def _reduce_in_bf16(rank: int) -> None:
    model = _model()
    reducer = _make_reducer(model, bucket_bytes=80, dtype=torch.bfloat16)
    _loss(model, rank).backward()
    reducer.finish(1.0)
    expected = _gradient(0).bfloat16() + _gradient(1).bfloat16()
    assert model[0].weight.grad.dtype is torch.float32
    assert torch.equal(model[0].weight.grad, expected.float())


def test_all_reduce_uses_communication_data_type() -> None:
    run_ranks(2, _reduce_in_bf16)


def test_communication_data_type_is_read_from_json() -> None:
    for engine_dtype in run_ranks(2, _engine_reduce_dtype):
        assert engine_dtype == torch.float32


def _engine_reduce_dtype(rank: int) -> torch.dtype | None:
    engine = make_engine(Toy("chain", config={"communication_data_type": "fp32"}), 1)
    return engine._reducer.dtype


class Scaled(PipelineModule):
    """Has a parameter of its own, and the same layer in two chunks."""

    def __init__(self, toy: Toy, chunks: int, num_stages: int) -> None:
        shared = Dense(50, toy.hidden_size, toy.dtype)
        layers = [LayerSpec(Dense, 10 + i, toy.hidden_size, toy.dtype) for i in range(4)]
        if chunks > 1:
            layers[0] = layers[2] = shared
        layers[-1] = self._scaled
        super().__init__(layers, num_stages=num_stages, loss_fn=toy.loss_fn, partition_method="uniform", chunks=chunks)
        self.scale = nn.Parameter(torch.full((1,), 1.5, dtype=toy.dtype))

    def _scaled(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


def _train_scaled(rank: int, chunks: int, num_stages: int, num_replicas: int) -> dict[str, torch.Tensor]:
    toy = Toy("chain", num_micro_batches=4 // num_replicas)
    engine = make_engine(toy, num_stages, module=Scaled(toy, chunks, num_stages))
    batches = [toy.make_batch(i) for i in range(4)]
    replica = engine.grid.get_data_parallel_rank()
    return train_batch(engine, toy, batches[replica * toy.num_micro_batches : (replica + 1) * toy.num_micro_batches])[1]


@pytest.mark.parametrize(("chunks", "num_stages"), [(1, 1), (2, 2)])
def test_shared_and_module_parameters_are_reduced_once(chunks: int, num_stages: int) -> None:
    """The same four micro-batches on one replica and on two."""
    single_replica = run_ranks(num_stages, _train_scaled, chunks, num_stages, 1)
    for rank, got in enumerate(run_ranks(2 * num_stages, _train_scaled, chunks, num_stages, 2)):
        expected = single_replica[rank // 2]
        assert set(got) == set(expected)
        for name in got:
            assert torch.allclose(got[name], expected[name], rtol=1e-12, atol=0), name


def _accumulate_twice(rank: int) -> str:
    model = nn.Sequential(nn.Linear(4, 4, bias=False))
    reducer = _make_reducer(model)
    dist.barrier()  # a rank that fails below must not end before the other one has connected to it
    x = torch.randn(3, 4, requires_grad=True)
    for _ in range(2):
        x = checkpoint(model[0], x, use_reentrant=True)
    with pytest.raises(RuntimeError) as raised, reducer.last_backward(0):
        x.sum().backward()
    return str(raised.value)


def test_repeated_gradient_accumulation_in_backward_is_rejected() -> None:
    for message in run_ranks(2, _accumulate_twice):
        assert "use_reentrant=False" in message


def _train_with_unfreezing(rank: int, num_replicas: int, also_freezes: bool) -> list[dict[str, torch.Tensor]]:
    """Unfreeze the first weight after a step, and freeze the second for one; return the weights after each step."""
    toy = Toy("chain", num_micro_batches=4 // num_replicas)
    module = PipelineModule(toy.layer_specs(), num_stages=1, loss_fn=toy.loss_fn)
    first, second = list(module.parameters())[:2]
    first.requires_grad_(False)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    batches = [toy.make_batch(rank * toy.num_micro_batches + i) for i in range(toy.num_micro_batches)]
    config = {
        "train_micro_batch_size_per_gpu": toy.micro_batch_size,
        "gradient_accumulation_steps": toy.num_micro_batches,
        "gradient_clipping": 0.5,
    }
    tds.init_distributed("gloo", verbose=False)
    engine = tds.initialize(model=module, optimizer=optimizer, config=config)[0]
    weights = []
    for step in range(3):
        engine.train_batch(iter(batches))
        first.requires_grad_(True)
        second.requires_grad_(not also_freezes or step > 0)
        weights.append({name: p.detach().clone() for name, p in module.named_parameters()})
    return weights


@pytest.mark.parametrize("also_freezes", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_freezing_between_steps_keeps_replicas_equal(also_freezes: bool) -> None:
    (single_replica,) = run_ranks(1, _train_with_unfreezing, 1, also_freezes)
    assert not torch.equal(single_replica[0]["0.inner.weight"], single_replica[1]["0.inner.weight"])
    assert torch.equal(single_replica[0]["0.inner.bias"], single_replica[1]["0.inner.bias"]) == also_freezes
    assert not torch.equal(single_replica[1]["0.inner.bias"], single_replica[2]["0.inner.bias"])
    rank0, rank1 = run_ranks(2, _train_with_unfreezing, 2, also_freezes)
    for rank0_weights, rank1_weights, expected in zip(rank0, rank1, single_replica, strict=True):
        for name, weight in rank0_weights.items():
            assert torch.equal(weight, rank1_weights[name]), name
            assert torch.allclose(weight, expected[name], rtol=1e-12, atol=0), name


def _unfreeze_under_zero_1(rank: int) -> str:
    toy = Toy("chain", dtype=torch.float32)
    module = PipelineModule(toy.layer_specs(), num_stages=1, loss_fn=toy.loss_fn)
    weight = next(module.parameters()).requires_grad_(False)
    zero = {"zero_optimization": {"stage": 1}, "zero_allow_untested_optimizer": True}
    engine = make_engine(Toy("chain", dtype=torch.float32, config=zero), 1, module=module)
    engine.train_batch(iter(toy.make_batches()))
    weight.requires_grad_(True)
    with pytest.raises(RuntimeError) as raised:
        engine.train_batch(iter(toy.make_batches()))
    return str(raised.value)


def test_unfrozen_weight_unknown_to_zero_optimizer_raises() -> None:
    preload_zero()
    (message,) = run_ranks(1, _unfreeze_under_zero_1)
    assert "0.inner.weight was unfrozen later" in message
