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
from tests.helpers.whole import fill, random, whole_world

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


def recorded(monkeypatch: pytest.MonkeyPatch, *, sequence_parallel: bool, adds: bool = False) -> list[str]:
    """Return the order of events in the backward of a layer whose group is a stand-in; with ``adds`` a fused one."""
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
    if adds:

        def add_product(rows: torch.Tensor, inputs: torch.Tensor) -> None:
            events.append(f"{[*rows.shape]} and {[*inputs.shape]} are added")

        set_info(layer.weight, replace(info_of(layer.weight), add_product=add_product))
    x = torch.zeros(S // 2 if sequence_parallel else S, B, H, requires_grad=True)
    y = layer(x)
    events.clear()
    with Recorder(events):
        y.sum().backward()
    assert (layer.weight.grad is None) == adds
    return events


def test_the_sum_starts_ahead_of_the_product_of_the_weight_and_is_awaited_behind_it(monkeypatch):
    assert recorded(monkeypatch, sequence_parallel=False) == [
        "product of the input", "the sum starts", "product of the weight", "the sum is there",
    ]  # fmt: skip


def test_parts_are_joined_again_beside_the_product_of_the_input(monkeypatch):
    assert recorded(monkeypatch, sequence_parallel=True) == [
        "the input starts", "product of the input", "the sum starts", "the input is there", "product of the weight",
        "the sum is there",
    ]  # fmt: skip


def test_a_product_that_adds_to_the_gradient_runs_beside_the_sum_too(monkeypatch):
    assert recorded(monkeypatch, sequence_parallel=True, adds=True) == [
        "the input starts", "product of the input", "the sum starts", "the input is there",
        f"[{S * B}, {COLUMNS}] and [{S * B}, {H}] are added", "the sum is there",
    ]  # fmt: skip


def everything(x: torch.Tensor, pairs: Any, group: Group, cuts: bool) -> list[torch.Tensor]:
    """Return outputs and all gradients of two products, which weigh what they give unlike each other."""
    outputs = layers.column_products(x, pairs, group, cuts)
    loss = sum((torch.sin(y) * (number + 1)).sum() for number, y in enumerate(outputs))
    leaves = [x, *(leaf for pair in pairs for leaf in pair if leaf is not None)]
    return [*(y.detach() for y in outputs), *torch.autograd.grad(loss, leaves)]


def both_ways(rank: int, size: int) -> list[tuple[str, list[bool], bool]]:
    """Return, for each type and kind of layer, which tensors are the same bits, and whether the product is ours."""
    group, found = whole_world(rank, size), []
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        for cuts in (False, True):
            for ways, has_bias in ((1, True), (1, False), (2, True)):
                x = random(1 + rank * cuts, S // (size if cuts else 1), B, H).to(dtype).requires_grad_()
                both = random(10 + rank, COLUMNS, ways, H).to(dtype).requires_grad_()  # of one weight, every other row
                weights = both.unbind(1)
                biases = [random(20 + rank, COLUMNS).to(dtype).requires_grad_() if has_bias else None] * ways
                pairs = list(zip(weights, biases, strict=True))
                at_once = everything(x, pairs, group, cuts)
                with mock.patch.object(layers, "is_deferring_weight_grads", lambda: True):
                    one_by_one = everything(x, pairs, group, cuts)
                same = [torch.equal(a, b) for a, b in zip(at_once, one_by_one, strict=True)]
                y = layers.column_products(x, pairs, group, cuts)[0]
                found.append((f"{dtype} {cuts} {ways} {has_bias}", same, "_ColumnProducts" in y.grad_fn.name()))
    return found


def test_the_bits_are_those_of_the_same_products_one_after_another():
    for found in run_ranks(2, both_ways, 2):
        assert len(found) == 18
        for case, same, is_ours in found:
            assert all(same), (case, same)
            assert is_ours, "what is compared must not be the plain functions twice"


@pytest.mark.parametrize(
    "weight", [random(3, 5, H), random(3, 5, 2, H)[:, 1], random(3, 1, 2, H)[:, 1]], ids=["whole", "apart", "a row"]
)
def test_the_gradient_of_a_weight_is_the_product_that_autograd_makes(weight: torch.Tensor) -> None:
    """It lies as that one does. Where MKL gives both products the same bits, nothing else tells them apart."""
    x, grad, weight = random(1, S, B, H), random(2, S, B, weight.shape[0]), weight.detach().requires_grad_()
    (wanted,) = torch.autograd.grad(F.linear(x, weight), weight, grad)
    found = layers._of_weight(weight, grad.flatten(0, 1), x.flatten(0, 1))
    assert torch.equal(found, wanted) and found.stride() == wanted.stride()


def test_a_schedule_that_puts_weights_off_sees_every_product(monkeypatch):
    group = Group((0, 1), 0, "stand-in")
    monkeypatch.setattr(mappings.dist, "all_reduce", lambda x, group, **how: Handle([], ""))
    layer, splitter, key = ColumnParallelLinear(H, 2 * COLUMNS, group=group), WeightGradStore(), (0, 0)
    with splitter.active():
        y = layer(torch.zeros(S, B, H, requires_grad=True))
    with splitter.deferring(key):
        y.sum().backward()
    assert splitter.split == {layer.weight, layer.bias}
    assert layer.weight.grad is None
    splitter.run(key)
    assert layer.weight.grad is not None


A, BIAS_A, C, BIAS_C = random(1, COLUMNS, H), random(2, COLUMNS), random(3, H, COLUMNS), random(4, H)
X, UPSTREAM = random(5, S, B, H), random(6, S, B, H)


def column_then_row(rank, size):
    group = whole_world(rank, size)
    up = ColumnParallelLinear(H, COLUMNS, group=group, sequence_parallel=True).double()
    down = RowParallelLinear(COLUMNS, H, group=group, sequence_parallel=True).double()
    for layer, weight, bias in ((up, A, BIAS_A), (down, C, BIAS_C)):
        fill(layer.weight, weight)
        fill(layer.bias, bias)
    x = X.chunk(size)[rank].clone().requires_grad_()
    y = down(torch.tanh(up(x)))
    y.backward(UPSTREAM.chunk(size)[rank])
    partial = [is_partial(p) for layer in (up, down) for p in (layer.weight, layer.bias)]
    gradients = [(shard_of(p), p.grad) for layer in (up, down) for p in (layer.weight, layer.bias)]
    return y.detach(), x.grad, gradients, partial


@functools.cache
def of_parts(size):
    return run_ranks(size, column_then_row, size)


def close(found, wanted):
    return (found - wanted).abs().max() <= 1e-13 * wanted.abs().max()


def test_parts_of_the_sequence_go_in_and_come_out():
    x = X.clone().requires_grad_()
    weights = [w.clone().requires_grad_() for w in (A, BIAS_A, C, BIAS_C)]
    y = F.linear(torch.tanh(F.linear(x, *weights[:2])), *weights[2:])
    y.backward(UPSTREAM)
    ranks = of_parts(2)
    assert close(torch.cat([each[0] for each in ranks]), y.detach())
    assert close(torch.cat([each[1] for each in ranks]), x.grad)
    for _, _, gradients, _ in ranks:
        for (shard, gradient), whole in zip(gradients[:3], weights[:3], strict=True):
            assert close(gradient, shard.cut(whole.grad))
    assert close(sum(each[2][3][1] for each in ranks), weights[3].grad), "the bias behind the sum: a share on each rank"
    assert all(each[3] == [False, False, False, True] for each in ranks), "that bias alone is a summand"


def odd_length(rank, size):
    layer = RowParallelLinear(COLUMNS, H, group=whole_world(rank, size), sequence_parallel=True)
    with pytest.raises(ValueError, match="--sequence-parallel, the sequence length must be a multiple .* got 5 and 2"):
        layer(torch.zeros(5, B, COLUMNS // size))


def test_a_sequence_that_does_not_divide_is_refused():
    run_ranks(2, odd_length, 2)
