"""Gradients of weights that are put off are the same gradients."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import tds
from tds.engine.weight_grad_store import WeightGradStore
from tests.helpers.harness import run_ranks
from tests.helpers.toys import Dense, Toy, make_engine, train_batch

DTYPES = [torch.float32, torch.float64, torch.bfloat16]


class Net(nn.Module):
    """Linear layers with and without bias, a norm, one weight that two calls share, and one whose rows alternate."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.wide = nn.Linear(8, 16, dtype=dtype)
        self.norm = nn.LayerNorm(16, dtype=dtype)
        self.narrow = nn.Linear(16, 8, bias=False, dtype=dtype)
        self.square = nn.Linear(8, 8, dtype=dtype)
        self.gated = nn.Linear(8, 10, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.narrow(self.norm(F.gelu(self.wide(x)))))
        x = F.linear(x, self.square.weight, self.square.bias)
        pairs = zip(*(p.unflatten(0, (-1, 2)).unbind(1) for p in (self.gated.weight, self.gated.bias)), strict=True)
        gate, value = (F.linear(x, weight, bias) for weight, bias in pairs)
        return torch.sigmoid(gate) * value


def _with_recompute(net: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: checkpoint(net, x, use_reentrant=False)  # type: ignore[no-any-return]


def _split_step(net: nn.Module, x: torch.Tensor, store: WeightGradStore, key: tuple[int, int], recompute: bool) -> None:
    forward = _with_recompute(net) if recompute else net
    with store.active():
        loss = forward(x).square().sum()
        with store.deferring(key):
            loss.backward()


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(8,), (5, 8), (4, 5, 8)], ids=str)
def test_split_backward_equals_full_backward(shape: tuple[int, ...], dtype: torch.dtype, recompute: bool) -> None:
    unsplit, split, store = Net(dtype), Net(dtype), WeightGradStore()
    for micro_batch in range(3):
        x = torch.randn(shape, generator=torch.Generator().manual_seed(micro_batch)).to(dtype)
        unsplit_input, split_input = x.clone().requires_grad_(), x.clone().requires_grad_()
        unsplit(unsplit_input).square().sum().backward()
        _split_step(split, split_input, store, (micro_batch, 0), recompute)
        assert torch.equal(unsplit_input.grad, split_input.grad)
        store.run((micro_batch, 0))
    for (name, expected), got in zip(unsplit.named_parameters(), split.parameters(), strict=True):
        assert torch.equal(expected.grad, got.grad), name


def test_only_linear_weights_are_deferred_and_others_reported() -> None:
    net, store = Net(torch.float32), WeightGradStore()
    _split_step(net, torch.randn(5, 8), store, (0, 0), recompute=False)
    computed = {name for name, p in net.named_parameters() if p.grad is not None}
    assert computed == {"norm.weight", "norm.bias"}
    description = store.describe_split(dict(net.named_parameters()))
    assert "norm.weight" in description and "93.1 %" in description, description
    store.run((0, 0))
    assert all(p.grad is not None for p in net.parameters())


def test_hooks_run_when_weight_gradient_is_computed() -> None:
    net, store = Net(torch.float32), WeightGradStore()
    seen: list[str] = []
    for name, parameter in net.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: seen.append(name))
    _split_step(net, torch.randn(5, 8), store, (0, 0), recompute=False)
    assert sorted(seen) == ["norm.bias", "norm.weight"]
    store.run((0, 0))
    assert len(seen) == len(set(seen)) == 9


def test_frozen_autocast_and_non_leaf_weights_are_not_split() -> None:
    store = WeightGradStore()
    frozen = nn.Linear(4, 4).requires_grad_(False)
    table = torch.randn(3, 4, requires_grad=True)
    x = torch.randn(2, 4, requires_grad=True)
    with store.active():
        loss = frozen(x).sum() + F.linear(x, table * 2).sum()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = loss + nn.Linear(4, 4)(x).sum()
        with store.deferring((0, 0)):
            loss.backward()
    assert not store.split_leaves
    assert table.grad is not None and x.grad is not None
    store.run((0, 0))
    assert frozen.weight.grad is None


def test_patched_linear_is_called_and_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    original, calls = F.linear, []

    def counted(*args: Any) -> torch.Tensor:
        calls.append(args)
        return original(*args)

    store = WeightGradStore()
    monkeypatch.setattr(F, "linear", counted)
    with pytest.raises(KeyError), store.active():
        nn.Linear(4, 4)(torch.randn(2, 4))
        raise KeyError
    assert F.linear is counted and len(calls) == 1


def _collect_messages(rank: int) -> list[str]:
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("tds").addHandler(handler)
    engine = make_engine(Toy("chain", pipeline={"schedule": "zb-h1"}), 2)
    for _ in range(2):
        train_batch(engine, Toy("chain"))
    return [text for text in messages if "weight gradients are deferred" in text]


def test_engine_logs_split_weights_once() -> None:
    first, last = run_ranks(2, _collect_messages)
    assert first == [], "the first stage's backward is whole"
    assert last == ["zb-h1, stage 1: all its weight gradients are deferred"]


class LossWithWeights(nn.Module):
    """A product and a mean square, computed again in the backward if asked for."""

    def __init__(self, recomputes: bool) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.inner, self.recomputes = nn.Linear(6, 6, dtype=torch.float64), recomputes

    def forward(self, output: torch.Tensor, labels: Any) -> torch.Tensor:
        def error(x: torch.Tensor) -> torch.Tensor:
            return ((self.inner(x).tanh() - labels[0]) ** 2).mean()

        return checkpoint(error, output, use_reentrant=False) if self.recomputes else error(output)


def _train_with_loss_module(rank: int, recomputes: bool, schedule: str) -> Any:
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("tds").addHandler(handler)
    toy = Toy("chain", pipeline={"schedule": schedule})
    module = tds.PipelineModule(toy.layer_specs(), num_stages=2, loss_fn=LossWithWeights(recomputes))
    engine = make_engine(toy, 2, module=module)
    loss = engine.train_batch(iter(toy.make_batches()))
    return float(loss), [text for text in messages if "weight gradients are deferred" in text]


@pytest.mark.parametrize("recomputes", [pytest.param(False, marks=pytest.mark.slow), True])
def test_loss_function_weights_are_deferred(recomputes: bool) -> None:
    (expected, _), _ = run_ranks(2, _train_with_loss_module, recomputes, "1f1b")
    (loss, _), (_, messages) = run_ranks(2, _train_with_loss_module, recomputes, "zb-h1")
    assert loss == expected
    assert messages == ["zb-h1, stage 1: all its weight gradients are deferred"]


def _count_linear_calls(rank: int) -> list[int]:
    """Return how often a step of 6 micro-batches runs a linear layer that can be split, and the number of layers."""
    calls: list[int] = []
    original = WeightGradStore.linear

    def counted(self: WeightGradStore, *args: Any) -> Any:
        calls.append(1)
        return original(self, *args)

    WeightGradStore.linear = counted  # type: ignore[method-assign]
    toy = Toy("chain", num_layers=7, num_micro_batches=6, pipeline={"schedule": "zb-h1"}, options={"chunks": 2})
    engine = make_engine(toy, 2)
    train_batch(engine, toy)
    return [len(calls), sum(isinstance(layer, Dense) for layer in engine.module.modules())]


def test_unsplit_backwards_use_torch_linear() -> None:
    (first, _), (last, layers) = run_ranks(2, _count_linear_calls)
    assert (first, last) == (0, 2 * layers), "stage 1 splits the last two micro-batches of six"
