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
from tests.helpers.toys import Dense, Toy, make_engine, preload_zero, train


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


def _sums(
    model: nn.Sequential,
    num_chunks: int = 1,
    tied: Sequence[nn.Parameter] = (),
    bucket_bytes: int | None = None,
    **more: Any,
) -> BucketReducer:
    gradients = Gradients(torch.optim.SGD(model.parameters(), lr=0.1))
    order = ChunkOrder(model.parameters(), _chunks(model, num_chunks), tied, bucket_bytes)
    return BucketReducer(order, gradients.of, dist.group.WORLD, **more)


def _loss(model: nn.Module, rank: int) -> torch.Tensor:
    return model(torch.randn(3, 4, generator=torch.Generator().manual_seed(rank))).square().sum()


def _reduce(
    rank: int, num_chunks: int, has_tied: bool, skipped: int | None, starts_early: bool = True
) -> tuple[list[int], list[torch.Tensor]]:
    """Return (how many buckets had started when each layer's weight got its gradient, the gradients).

    Without ``starts_early`` their number behind the whole backward is the last one.
    """
    model, plain = _model(), _model()
    if skipped is not None and rank == 0:
        model[skipped], plain[skipped] = Unused(), Unused()
    sums = _sums(model, num_chunks, [model[0].weight] if has_tied else [], bucket_bytes=80, starts_early=starts_early)
    started: list[int] = []
    start = GradientBucket.start_all_reduce

    def counting(*args: Any) -> Any:
        counting.number += 1  # type: ignore[attr-defined]
        return start(*args)

    counting.number = 0  # type: ignore[attr-defined]
    GradientBucket.start_all_reduce = counting  # type: ignore[method-assign]
    try:
        for layer in model:
            layer.weight.register_post_accumulate_grad_hook(lambda _: started.append(counting.number))  # type: ignore[attr-defined]
        with sums.last_backward(0):
            _loss(model, rank).backward()
        for chunk in range(num_chunks):
            sums.register_chunk_ready(chunk)
        if not starts_early:
            started.append(counting.number)  # type: ignore[attr-defined]
        sums.finish(0.5)
    finally:
        GradientBucket.start_all_reduce = start  # type: ignore[method-assign]
    _loss(plain, rank).backward()
    wanted = [torch.zeros_like(p) if p.grad is None else p.grad for p in plain.parameters()]
    reduce_gradients(wanted, dist.group.WORLD, 0.5)
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), wanted, strict=True))
    return started, wanted


@pytest.mark.parametrize("has_tied", [False, True])
def test_sums_start_while_the_backward_still_runs(has_tied: bool) -> None:
    for started, _ in run_ranks(2, _reduce, 1, has_tied, None):
        assert started == sorted(started) and started[-1] >= 4, started


def test_sums_may_all_start_after_the_backward() -> None:
    for started, _ in run_ranks(2, _reduce, 1, False, None, False):
        assert set(started) == {0}


def test_chunks_that_are_ready_late_hold_up_those_behind_them() -> None:
    for started, _ in run_ranks(2, _reduce, 2, False, None):
        assert set(started) == {0}, "chunk 1 goes first on every replica, and is not ready in this backward"


def test_a_parameter_without_gradient_on_one_replica_changes_no_order() -> None:
    for skipped in (0, 3, 5):
        run_ranks(2, _reduce, 1, False, skipped)


def test_a_second_batch_starts_anew() -> None:
    def twice(rank: int) -> None:
        model = _model()
        sums = _sums(model)
        for _ in range(2):
            model.zero_grad()
            with sums.last_backward(0):
                _loss(model, rank).backward()
            sums.register_chunk_ready(0)
            sums.finish(1.0)
        wanted = sum(_gradient(r) for r in range(2))
        assert torch.allclose(model[0].weight.grad, wanted, atol=1e-6)

    run_ranks(2, twice)


def _gradient(rank: int) -> torch.Tensor:
    model = _model()
    _loss(model, rank).backward()
    return model[0].weight.grad


def _in_half(rank: int) -> None:
    model = _model()
    sums = _sums(model, bucket_bytes=80, dtype=torch.bfloat16)
    _loss(model, rank).backward()
    sums.finish(1.0)
    wanted = _gradient(0).bfloat16() + _gradient(1).bfloat16()
    assert model[0].weight.grad.dtype is torch.float32
    assert torch.equal(model[0].weight.grad, wanted.float())


def test_sums_are_taken_in_the_communication_data_type() -> None:
    run_ranks(2, _in_half)


def test_the_json_says_in_which_type_gradients_travel() -> None:
    for engine_dtype in run_ranks(2, _of_engine):
        assert engine_dtype == torch.float32


def _of_engine(rank: int) -> torch.dtype | None:
    engine = make_engine(Toy("chain", config={"communication_data_type": "fp32"}), 1)
    return engine._reducer.dtype


class Scaled(PipelineModule):
    """Has a parameter of its own, and the same layer in two chunks."""

    def __init__(self, toy: Toy, chunks: int, num_stages: int) -> None:
        shared = Dense(50, toy.wide, toy.dtype)
        layers = [LayerSpec(Dense, 10 + i, toy.wide, toy.dtype) for i in range(4)]
        if chunks > 1:
            layers[0] = layers[2] = shared
        layers[-1] = self._scaled
        super().__init__(layers, num_stages=num_stages, loss_fn=toy.loss_fn, partition_method="uniform", chunks=chunks)
        self.scale = nn.Parameter(torch.full((1,), 1.5, dtype=toy.dtype))

    def _scaled(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


def _trained(rank: int, chunks: int, num_stages: int, split: int) -> dict[str, torch.Tensor]:
    toy = Toy("chain", micro_batches=4 // split)
    engine = make_engine(toy, num_stages, module=Scaled(toy, chunks, num_stages))
    every = [toy.batch(i) for i in range(4)]
    replica = engine.grid.get_data_parallel_rank()
    return train(engine, toy, every[replica * toy.micro_batches : (replica + 1) * toy.micro_batches])[1]


@pytest.mark.parametrize(("chunks", "num_stages"), [(1, 1), (2, 2)])
def test_what_is_of_no_layer_or_of_two_chunks_is_added_up_once_all_have_added_to_it(
    chunks: int, num_stages: int
) -> None:
    """The same four micro-batches on one replica and on two."""
    alone = run_ranks(num_stages, _trained, chunks, num_stages, 1)
    for rank, got in enumerate(run_ranks(2 * num_stages, _trained, chunks, num_stages, 2)):
        wanted = alone[rank // 2]
        assert set(got) == set(wanted)
        for name in got:
            assert torch.allclose(got[name], wanted[name], rtol=1e-12, atol=0), name


def _twice_in_a_backward(rank: int) -> str:
    model = nn.Sequential(nn.Linear(4, 4, bias=False))
    sums = _sums(model)
    dist.barrier()  # a rank that fails below must not end before the other one has connected to it
    x = torch.randn(3, 4, requires_grad=True)
    for _ in range(2):
        x = checkpoint(model[0], x, use_reentrant=True)
    with pytest.raises(RuntimeError) as raised, sums.last_backward(0):
        x.sum().backward()
    return str(raised.value)


def test_a_weight_that_gets_its_gradient_in_parts_is_refused() -> None:
    for message in run_ranks(2, _twice_in_a_backward):
        assert "use_reentrant=False" in message


def _unfrozen(rank: int, split: int, also_freezes: bool) -> list[dict[str, torch.Tensor]]:
    """Unfreeze the first weight after a step, and freeze the second for one; return the weights after each step."""
    toy = Toy("chain", micro_batches=4 // split)
    module = PipelineModule(toy.specs(), num_stages=1, loss_fn=toy.loss_fn)
    first, second = list(module.parameters())[:2]
    first.requires_grad_(False)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    batches = [toy.batch(rank * toy.micro_batches + i) for i in range(toy.micro_batches)]
    config = {"train_micro_batch_size_per_gpu": toy.rows, "gradient_accumulation_steps": toy.micro_batches,
              "gradient_clipping": 0.5}  # fmt: skip
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
def test_weights_frozen_and_unfrozen_between_steps_stay_equal_on_all_replicas(also_freezes: bool) -> None:
    (alone,) = run_ranks(1, _unfrozen, 1, also_freezes)
    assert not torch.equal(alone[0]["0.inner.weight"], alone[1]["0.inner.weight"])
    assert torch.equal(alone[0]["0.inner.bias"], alone[1]["0.inner.bias"]) == also_freezes
    assert not torch.equal(alone[1]["0.inner.bias"], alone[2]["0.inner.bias"])
    one, two = run_ranks(2, _unfrozen, 2, also_freezes)
    for mine, others, wanted in zip(one, two, alone, strict=True):
        for name, weight in mine.items():
            assert torch.equal(weight, others[name]), name
            assert torch.allclose(weight, wanted[name], rtol=1e-12, atol=0), name


def _unfrozen_under(rank: int) -> str:
    toy = Toy("chain", dtype=torch.float32)
    module = PipelineModule(toy.specs(), num_stages=1, loss_fn=toy.loss_fn)
    weight = next(module.parameters()).requires_grad_(False)
    zero = {"zero_optimization": {"stage": 1}, "zero_allow_untested_optimizer": True}
    engine = make_engine(Toy("chain", dtype=torch.float32, config=zero), 1, module=module)
    engine.train_batch(iter(toy.batches()))
    weight.requires_grad_(True)
    with pytest.raises(RuntimeError) as raised:
        engine.train_batch(iter(toy.batches()))
    return str(raised.value)


def test_a_weight_that_deepspeeds_optimizer_did_not_take_is_not_left_out_in_silence() -> None:
    preload_zero()
    (message,) = run_ranks(1, _unfrozen_under)
    assert "0.inner.weight was unfrozen later" in message
