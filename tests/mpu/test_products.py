"""Column-parallel products: what runs beside what in the backward, the same bits as one after another, and parts."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.mpu import layers, mappings
from megatron.mpu.groups import Group
from megatron.mpu.layers import ColumnParallelLinear, RowParallelLinear
from megatron.mpu.shard import is_partial, shard_of
from megatron.torch_compat import name_of
from tds.engine.weight_grad_store import WeightGradStore
from tds.param_info import info_of, set_info
from tests.helpers.harness import run_ranks
from tests.helpers.whole import fill_shard, group_of_all_ranks, random_tensor

S, B, H, COLUMNS = 6, 3, 8, 10


class Recorder(TorchDispatchMode):
    """Notes each matrix product by the name of the matrix that is not the gradient."""

    def __init__(self, events: list[str]) -> None:
        super().__init__()
        self.events = events

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.mm.default:
            self.events.append("product of the input" if args[1].shape[1] == H and args[0].shape[0] == S * B else "")
            self.events[-1] = self.events[-1] or "product of the weight"
        return func(*args, **(kwargs or {}))


class Handle:
    """What a collective returns that runs beside the computation."""

    def __init__(self, events: list[str], name: str) -> None:
        self.events, self.name = events, name

    def wait(self) -> None:
        self.events.append(f"{self.name} is there")


def record_backward(monkeypatch: pytest.MonkeyPatch, *, sequence_parallel: bool, is_fused: bool = False) -> list[str]:
    """Return the order of events in the backward of a (fused, with ``is_fused``) layer whose group is a fake."""
    events: list[str] = []

    def start(name: str) -> Any:
        def collective(*tensors: torch.Tensor, group: Any, async_op: bool = False) -> Any:
            assert group == "stand-in"
            if not async_op:
                return None
            events.append(f"{name} starts")
            return Handle(events, name)

        return collective

    for function, name in (
        ("all_reduce", "the sum"),
        (name_of("all_gather_single"), "the input"),
        (name_of("reduce_scatter_single"), "the sum"),
    ):
        monkeypatch.setattr(mappings.dist, function, start(name))
    group = Group((0, 1), 0, "stand-in")
    layer = ColumnParallelLinear(H, 2 * COLUMNS, group=group, sequence_parallel=sequence_parallel)
    if is_fused:

        def add_product(rows: torch.Tensor, inputs: torch.Tensor) -> None:
            events.append(f"{[*rows.shape]} and {[*inputs.shape]} are added")

        set_info(layer.weight, replace(info_of(layer.weight), add_product=add_product))
    x = torch.zeros(S // 2 if sequence_parallel else S, B, H, requires_grad=True)
    y = layer(x)
    events.clear()
    with Recorder(events):
        y.sum().backward()
    assert (layer.weight.grad is None) == is_fused
    return events


def test_all_reduce_overlaps_weight_product(monkeypatch):
    assert record_backward(monkeypatch, sequence_parallel=False) == [
        "product of the input", "the sum starts", "product of the weight", "the sum is there",
    ]  # fmt: skip


def test_input_gather_overlaps_input_product(monkeypatch):
    assert record_backward(monkeypatch, sequence_parallel=True) == [
        "the input starts", "product of the input", "the sum starts", "the input is there", "product of the weight",
        "the sum is there",
    ]  # fmt: skip


def test_fused_weight_gradient_overlaps_reduce_scatter(monkeypatch):
    assert record_backward(monkeypatch, sequence_parallel=True, is_fused=True) == [
        "the input starts", "product of the input", "the sum starts", "the input is there",
        f"[{S * B}, {COLUMNS}] and [{S * B}, {H}] are added", "the sum is there",
    ]  # fmt: skip


def run_products(x: torch.Tensor, pairs: Any, group: Group, is_sequence_parallel: bool) -> list[torch.Tensor]:
    """Return outputs and all gradients of two products, which weigh what they give unlike each other."""
    outputs = layers.column_products(x, pairs, group, is_sequence_parallel)
    loss = sum((torch.sin(y) * (idx + 1)).sum() for idx, y in enumerate(outputs))
    leaves = [x, *(leaf for pair in pairs for leaf in pair if leaf is not None)]
    return [*(y.detach() for y in outputs), *torch.autograd.grad(loss, leaves)]


def compare_modes(rank: int, size: int) -> list[tuple[str, list[bool], bool]]:
    """Return, for each type and kind of layer, which tensors are the same bits, and whether the product is ours."""
    group, results = group_of_all_ranks(rank, size), []
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        for is_sequence_parallel in (False, True):
            for num_products, has_bias in ((1, True), (1, False), (2, True)):
                x = (
                    random_tensor(1 + rank * is_sequence_parallel, S // (size if is_sequence_parallel else 1), B, H)
                    .to(dtype)
                    .requires_grad_()
                )
                packed = (
                    random_tensor(10 + rank, COLUMNS, num_products, H).to(dtype).requires_grad_()
                )  # of one weight, every other row
                weights = packed.unbind(1)
                biases = [
                    random_tensor(20 + rank, COLUMNS).to(dtype).requires_grad_() if has_bias else None
                ] * num_products
                pairs = list(zip(weights, biases, strict=True))
                overlapped = run_products(x, pairs, group, is_sequence_parallel)
                with mock.patch.object(layers, "is_deferring_weight_grads", lambda: True):
                    sequential = run_products(x, pairs, group, is_sequence_parallel)
                is_equal = [torch.equal(a, b) for a, b in zip(overlapped, sequential, strict=True)]
                y = layers.column_products(x, pairs, group, is_sequence_parallel)[0]
                results.append(
                    (
                        f"{dtype} {is_sequence_parallel} {num_products} {has_bias}",
                        is_equal,
                        "_ColumnProducts" in y.grad_fn.name(),
                    )
                )
    return results


def test_overlapped_products_are_bitwise_equal_to_sequential():
    for results in run_ranks(2, compare_modes, 2):
        assert len(results) == 18
        for case, is_equal, uses_overlap in results:
            assert all(is_equal), (case, is_equal)
            assert uses_overlap, "what is compared must not be the plain functions twice"


@pytest.mark.parametrize(
    "weight",
    [random_tensor(3, 5, H), random_tensor(3, 5, 2, H)[:, 1], random_tensor(3, 1, 2, H)[:, 1]],
    ids=["whole", "apart", "a row"],
)
def test_weight_gradient_is_bitwise_equal_to_autograd(weight: torch.Tensor) -> None:
    """It lies as that one does. Where MKL gives both products the same bits, nothing else tells them apart."""
    x, grad, weight = (
        random_tensor(1, S, B, H),
        random_tensor(2, S, B, weight.shape[0]),
        weight.detach().requires_grad_(),
    )
    (expected,) = torch.autograd.grad(F.linear(x, weight), weight, grad)
    actual = layers._weight_grad(weight, grad.flatten(0, 1), x.flatten(0, 1))
    assert torch.equal(actual, expected) and actual.stride() == expected.stride()


def test_deferred_schedule_splits_every_product(monkeypatch):
    group = Group((0, 1), 0, "stand-in")
    monkeypatch.setattr(mappings.dist, "all_reduce", lambda x, group, **kwargs: Handle([], ""))
    layer, store, key = ColumnParallelLinear(H, 2 * COLUMNS, group=group), WeightGradStore(), (0, 0)
    with store.active():
        y = layer(torch.zeros(S, B, H, requires_grad=True))
    with store.deferring(key):
        y.sum().backward()
    assert store.split_leaves == {layer.weight, layer.bias}
    assert layer.weight.grad is None
    store.run(key)
    assert layer.weight.grad is not None


A, BIAS_A, C, BIAS_C = (
    random_tensor(1, COLUMNS, H),
    random_tensor(2, COLUMNS),
    random_tensor(3, H, COLUMNS),
    random_tensor(4, H),
)
X, UPSTREAM = random_tensor(5, S, B, H), random_tensor(6, S, B, H)


def column_then_row(rank, size):
    group = group_of_all_ranks(rank, size)
    up = ColumnParallelLinear(H, COLUMNS, group=group, sequence_parallel=True).double()
    down = RowParallelLinear(COLUMNS, H, group=group, sequence_parallel=True).double()
    for layer, weight, bias in ((up, A, BIAS_A), (down, C, BIAS_C)):
        fill_shard(layer.weight, weight)
        fill_shard(layer.bias, bias)
    x = X.chunk(size)[rank].clone().requires_grad_()
    y = down(torch.tanh(up(x)))
    y.backward(UPSTREAM.chunk(size)[rank])
    partial = [is_partial(p) for layer in (up, down) for p in (layer.weight, layer.bias)]
    gradients = [(shard_of(p), p.grad) for layer in (up, down) for p in (layer.weight, layer.bias)]
    return y.detach(), x.grad, gradients, partial


@functools.cache
def rank_results(size):
    return run_ranks(size, column_then_row, size)


def is_close(actual, expected):
    return (actual - expected).abs().max() <= 1e-13 * expected.abs().max()


def test_sequence_shards_match_full_sequence():
    x = X.clone().requires_grad_()
    weights = [w.clone().requires_grad_() for w in (A, BIAS_A, C, BIAS_C)]
    y = F.linear(torch.tanh(F.linear(x, *weights[:2])), *weights[2:])
    y.backward(UPSTREAM)
    ranks = rank_results(2)
    assert is_close(torch.cat([result[0] for result in ranks]), y.detach())
    assert is_close(torch.cat([result[1] for result in ranks]), x.grad)
    for _, _, gradients, _ in ranks:
        for (shard, gradient), weight in zip(gradients[:3], weights[:3], strict=True):
            assert is_close(gradient, shard.narrow(weight.grad))
    assert is_close(sum(result[2][3][1] for result in ranks), weights[3].grad), (
        "the bias behind the sum: a share on each rank"
    )
    assert all(result[3] == [False, False, False, True] for result in ranks), "that bias alone is a summand"


def run_odd_length(rank, size):
    layer = RowParallelLinear(COLUMNS, H, group=group_of_all_ranks(rank, size), sequence_parallel=True)
    with pytest.raises(ValueError, match="--sequence-parallel, the sequence length must be a multiple .* got 5 and 2"):
        layer(torch.zeros(5, B, COLUMNS // size))


def test_rejects_indivisible_sequence():
    run_ranks(2, run_odd_length, 2)
