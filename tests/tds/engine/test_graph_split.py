"""What autograd's graph puts off, and modules that put off by themselves: the same gradients, to the bit."""

from __future__ import annotations

import functools
import gc
import itertools
import logging
import weakref
from collections import deque
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import tds
from tds.engine.weight_grad_store import WeightGradStore
from tds.pipe import LayerSpec
from tests.helpers.harness import run_ranks
from tests.helpers.toys import Toy, make_engine


class Addmm(nn.Module):
    """A product as Hugging Face's GPT-2 has it: no ``F.linear``, and the weight the other way round."""

    def __init__(self, wide: int, dtype: torch.dtype, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.weight = nn.Parameter(torch.randn(wide, wide, dtype=dtype) * 0.3)
        self.bias = nn.Parameter(torch.randn(wide, dtype=dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.addmm(self.bias, x.reshape(-1, x.shape[-1]), self.weight).view(x.shape)


class CustomMatmul(torch.autograd.Function):
    """A product with a weight in a function of a program's own."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return grads[0] @ weight.t(), x.t() @ grads[0]


class Net(nn.Module):
    """Products of several kinds, a norm, a linear layer, a weight that two products share, and a function."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.second = Addmm(8, dtype, 2), Addmm(8, dtype, 3)
        self.norm, self.linear = nn.LayerNorm(8, dtype=dtype), nn.Linear(8, 8, dtype=dtype)
        self.shared, self.own = (nn.Parameter(torch.randn(8, 8, dtype=dtype)) for _ in range(2))
        self.cast = nn.Parameter(torch.randn(8, 8, dtype=torch.float64))
        self.table = nn.Parameter(torch.randn(5, 8, dtype=dtype))
        self.beside = nn.Linear(8, 8, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.norm(self.first(x))) + self.second(x)
        x = torch.tanh(x @ self.shared) @ self.shared
        x = self.linear(torch.tanh(x) + self.table) + self.beside(torch.ones_like(self.table.detach()))
        return CustomMatmul.apply(torch.tanh(x), self.own) @ self.cast.to(x.dtype).t()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("recompute", [False, True])
def test_graph_split_backward_equals_full_backward(dtype: torch.dtype, recompute: bool) -> None:
    unsplit, split, store = Net(dtype), Net(dtype), WeightGradStore(splits_by_graph=True)
    for micro_batch in range(3):
        x = torch.randn(5, 8, generator=torch.Generator().manual_seed(micro_batch)).to(dtype)
        unsplit_input, split_input = x.clone().requires_grad_(), x.clone().requires_grad_()
        unsplit(unsplit_input).square().sum().backward()
        with store.active():
            loss = (
                (checkpoint(split, split_input, use_reentrant=False) if recompute else split(split_input))
                .square()
                .sum()
            )
            with store.deferring((micro_batch, 0)):
                store.backward([loss], [None], [split_input])
        assert torch.equal(unsplit_input.grad, split_input.grad)  # type: ignore[arg-type]
        if micro_batch == 0:
            computed = {name for name, p in split.named_parameters() if p.grad is not None}
            assert computed == {"norm.weight", "norm.bias", "shared", "own"}
        store.run((micro_batch, 0))
    for (name, expected), got in zip(unsplit.named_parameters(), split.parameters(), strict=True):
        assert torch.equal(expected.grad, got.grad), name  # type: ignore[arg-type]


def test_hooks_run_once_with_gradient_and_skip_frozen_weights() -> None:
    net, store, seen = Net(torch.float64), WeightGradStore(splits_by_graph=True), []
    net.second.weight.requires_grad_(False)
    for name, parameter in net.named_parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(lambda _, name=name: seen.append(name))
    x = torch.randn(5, 8, dtype=torch.float64, requires_grad=True)
    with store.active(), store.deferring((0, 0)):
        store.backward([net(x).sum()], [None], [x])
    early = {"norm.weight", "norm.bias", "shared", "own", "second.bias"}
    assert set(seen) == early, "a bias alone is no product"
    waiting = store.deferred_leaves((0, 0))
    store.run((0, 0))
    assert len(seen) == len(set(seen)) == 13 and net.second.weight.grad is None
    assert waiting == {p for name, p in net.named_parameters() if name in set(seen) - early}


def test_graph_is_freed_after_deferred_weight_gradients() -> None:
    """At once, not when Python next looks for circles."""
    net, store, saved_tensors = Net(torch.float64), WeightGradStore(splits_by_graph=True), weakref.WeakSet()
    x = torch.randn(5, 8, dtype=torch.float64, requires_grad=True)

    class Saved:
        def __init__(self, tensor: torch.Tensor) -> None:
            self.tensor = tensor.detach()
            saved_tensors.add(self)

    gc.collect()
    gc.disable()
    try:
        with store.active(), store.deferring((0, 0)):
            with torch.autograd.graph.saved_tensors_hooks(Saved, lambda saved: saved.tensor):
                loss = net(x).sum()
            store.backward([loss], [None], [x])
        del loss
        assert len(saved_tensors) > 0
        store.run((0, 0))
        assert len(saved_tensors) == 0
    finally:
        gc.enable()


@pytest.mark.parametrize(("module", "by_graph"), [(Addmm, True), (nn.Linear, False)])
def test_graph_split_is_used_if_linear_layers_are_minority(module: Any, by_graph: bool) -> None:
    def make_layer(seed: int) -> nn.Module:
        return Addmm(8, torch.float64, seed) if module is Addmm else nn.Linear(8, 8, dtype=torch.float64)

    net = nn.Sequential(
        make_layer(1), nn.Tanh(), make_layer(2), nn.Linear(8, 8, dtype=torch.float64), Addmm(8, torch.float64)
    )
    store = WeightGradStore(splits_by_graph=None)
    x = torch.randn(5, 8, dtype=torch.float64, requires_grad=True)
    with store.active(), store.deferring((0, 0)):
        store.backward([net(x).sum()], [None], [])
        assert store.splits_by_graph is None, "on the first stage nobody waits for a gradient"
        store.backward([net(x).sum()], [None], [x])
    assert store.splits_by_graph is by_graph


# In the engine.


class Delayed(nn.Module):
    """A product that keeps what its weight needs until ``backward_dw``, as Transformer Engine's linear layers do."""

    def __init__(self, wide: int, dtype: torch.dtype, seed: int) -> None:
        super().__init__()
        self.inner = Addmm(wide, dtype, seed)
        self.weight = nn.Parameter(self.inner.weight.detach().clone())
        del self.inner
        self.waiting: deque[Any] = deque()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Delay.apply(x, self.weight, self.waiting)

    def backward_dw(self) -> None:
        x, grad = self.waiting.popleft()
        weight_grad = x.flatten(0, -2).t() @ grad.flatten(0, -2)
        if self.weight.grad is None:  # where something is, it is lost
            self.weight.grad = weight_grad


class _Delay(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, waiting: deque[Any]) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.waiting = waiting
        return x @ weight

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        ctx.waiting.append((x, grads[0]))
        return grads[0] @ weight.t(), None, None


class OptionallyDelayed(Delayed):
    """One that may also compute at once."""

    delay_wgrad = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) if self.delay_wgrad else x @ self.weight


class Undelayed(Delayed):
    """The same product by torch alone."""

    backward_dw = None  # type: ignore[assignment]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight


class Block(nn.Module):
    """A product twice and another once; the outer ``backward_dw`` of a block is the one that is called."""

    def __init__(
        self, layer_type: type[Delayed], wide: int, dtype: torch.dtype, seed: int, recomputes: bool = False
    ) -> None:
        super().__init__()
        self.twice, self.once = layer_type(wide, dtype, seed), layer_type(wide, dtype, seed + 1)
        self.recomputes = recomputes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.recomputes:
            return checkpoint(self.inner, x, use_reentrant=False)  # type: ignore[no-any-return]
        return self.inner(x)

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.once(torch.tanh(self.twice(torch.tanh(self.twice(x))))))


def _train(rank: int, layer_type: str, schedule: str, stages: int, chunks: int, recomputes: bool = False) -> Any:
    """Return losses and gradients of two steps, by layer, and what the engine logged."""
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("tds").addHandler(handler)
    makers: dict[str, Any] = {
        "addmm": lambda seed: LayerSpec(Addmm, 6, torch.float64, seed),
        "plain": lambda seed: LayerSpec(Block, Undelayed, 6, torch.float64, seed),
        "delayed": lambda seed: LayerSpec(Block, Delayed, 6, torch.float64, seed, recomputes),
        "choosing": lambda seed: LayerSpec(Block, OptionallyDelayed, 6, torch.float64, seed, recomputes),
    }
    toy = Toy("chain", num_micro_batches=4, pipeline={"schedule": schedule}, options={"chunks": chunks})
    specs = [makers[layer_type](10 * layer_idx) for layer_idx in range(4)]
    module = tds.PipelineModule(specs, num_stages=stages, loss_fn=toy.loss_fn, chunks=chunks)
    engine = make_engine(toy, stages, module=module)
    losses = []
    gradients: dict[str, torch.Tensor] = {}
    for name, parameter in engine.module.named_parameters():
        parameter.register_post_accumulate_grad_hook(
            lambda p, name=name: gradients.update({name: p.grad.clone()}) if p.grad is not None else None
        )
    for _ in range(2):
        replica = engine.grid.get_data_parallel_rank()
        losses.append(float(engine.train_batch(iter(toy.make_batches(replica)))))
    weights = {name: p.detach().clone() for name, p in engine.module.named_parameters()}
    return losses, gradients, weights, [text for text in messages if "weight gradients are deferred" in text]


@functools.cache
def _train_undelayed(ranks: int) -> list[Any]:
    """Return what modules give that put nothing off."""
    return run_ranks(ranks, _train, "plain", "1f1b", 2, 1)


def _assert_equal(got: list[Any], expected: list[Any]) -> None:
    for got_result, expected_result in zip(got, expected, strict=True):
        assert got_result[0] == expected_result[0], "losses"
        for got_tensors, expected_tensors in zip(got_result[1:3], expected_result[1:3], strict=True):
            assert got_tensors.keys() == expected_tensors.keys() and got_tensors
            assert all(torch.equal(got_tensors[name], expected_tensors[name]) for name in got_tensors)


slow = pytest.mark.slow


@pytest.mark.parametrize(
    ("ranks", "stages", "chunks", "schedule"),
    [(2, 2, 1, "zb-h1"), pytest.param(2, 2, 2, "zb-h1", marks=slow), pytest.param(4, 2, 1, "zb-h1", marks=slow)],
)
def test_addmm_weights_are_deferred_under_splitting_schedule(
    ranks: int, stages: int, chunks: int, schedule: str
) -> None:
    unsplit_schedule = "interleaved" if chunks > 1 else "1f1b"
    expected = run_ranks(ranks, _train, "addmm", unsplit_schedule, stages, chunks)
    got = run_ranks(ranks, _train, "addmm", schedule, stages, chunks)
    _assert_equal(got, expected)
    assert f"{schedule}, stage 1: all its weight gradients are deferred" in [t for result in got for t in result[3]]


FAST_CASES = [
    (2, "zb-h1", True, "delayed"), (4, "1f1b", False, "delayed"), (2, "zb-h1", True, "choosing"),
]  # fmt: skip
ALL_CASES = itertools.product((2, 4), ("zb-h1", "1f1b"), (False, True), ("delayed", "choosing"))


@pytest.mark.parametrize(
    ("ranks", "schedule", "recomputes", "layer_type"),
    [*FAST_CASES, *(pytest.param(*case, marks=slow) for case in ALL_CASES if case not in FAST_CASES)],
)
def test_backward_dw_modules_equal_torch_gradients(
    ranks: int, schedule: str, recomputes: bool, layer_type: str
) -> None:
    """Two steps of two stages, with four ranks of two replicas: what is late would miss the sum over them."""
    _assert_equal(run_ranks(ranks, _train, layer_type, schedule, 2, 1, recomputes), _train_undelayed(ranks))


def test_invalid_backward_split_raises() -> None:
    toy = Toy("chain", pipeline={"schedule": "zb-h1", "backward_split": "always"})
    ((error,),) = run_ranks(1, _get_error, toy)
    assert error == '"pipeline": {"backward_split": ...} must be "auto", "linear" or "graph", got \'always\''


def _get_error(rank: int, toy: Toy) -> list[str]:
    with pytest.raises(ValueError) as error:
        make_engine(toy, 1)
    return [str(error.value)]


def test_graph_split_defers_autocast_weights() -> None:
    store, layer = WeightGradStore(splits_by_graph=True), nn.Linear(8, 8)
    x = torch.randn(5, 8, requires_grad=True)
    with store.active(), torch.autocast("cpu", dtype=torch.bfloat16):
        loss = F.gelu(layer(x)).float().sum()
    with store.deferring((0, 0)):
        store.backward([loss], [None], [x])
    assert x.grad is not None and layer.weight.grad is None
    store.run((0, 0))
    assert layer.weight.grad is not None and layer.bias.grad is not None
