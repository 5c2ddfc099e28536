"""Recompute: by a user's own function, and where inputs wait in parts, on the host or in DeepSpeed's buffers."""

from __future__ import annotations

import functools
import gc
import inspect
import logging
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from deepspeed.runtime.activation_checkpointing import checkpointing
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
from torch import nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import tds
from tds.deepspeed.recompute import Recompute, _Kept, recomputes_reentrantly
from tds.pipe import LayerSpec, PipelineModule
from tests.helpers.harness import run_ranks
from tests.helpers.toys import Dense, Tensors, Toy, check_equal, make_engine, train


class Masks:
    """Dropout masks by (micro-batch, layer), so that they depend on no order of work."""

    position = -1


class KeyedDropout(nn.Module):
    """A dense layer with the mask of the micro-batch that is running."""

    def __init__(self, seed: int, wide: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.seed = seed
        self.dense = Dense(seed, wide, dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        generator = torch.Generator().manual_seed(1000 * self.seed + Masks.position)
        return self.dense(x) * (torch.rand(x.shape, generator=generator) < 0.6)


def keyed_checkpoint(function: Any, *args: Any) -> Any:
    """Recompute at the position of the forward."""
    position = Masks.position

    def run(*inputs: Any) -> Any:
        now, Masks.position = Masks.position, position
        try:
            return function(*inputs)
        finally:
            Masks.position = now

    return torch_checkpoint(run, *args, use_reentrant=False, preserve_rng_state=False)


def _keyed(rank: int, toy: Toy, interval: int) -> tuple[float, Tensors, bool, bool]:
    tds.init_distributed("gloo", verbose=False)
    module = PipelineModule(
        [LayerSpec(KeyedDropout, 10 + i, toy.wide, toy.dtype) for i in range(toy.layers)],
        num_stages=2,
        partition_method="uniform",
        loss_fn=toy.loss_fn,
        activation_checkpoint_interval=interval,
        activation_checkpoint_func=keyed_checkpoint,
    )
    engine = make_engine(toy, 2, module=module)
    engine.on_micro_batch = functools.partial(setattr, Masks, "position")
    loss, gradients, _ = train(engine, toy)
    keeps = inspect.unwrap(module.activation_checkpoint_func) is keyed_checkpoint
    return float(loss), gradients, keeps, recomputes_reentrantly(module)


@pytest.mark.parametrize("pipeline", [pytest.param({}, marks=pytest.mark.slow), {"use_reentrant": False}])
def test_a_function_of_the_users_own_stays_and_keeps_its_masks(pipeline: dict[str, Any]) -> None:
    toy = Toy("chain", pipeline=pipeline)
    without, recomputed = run_ranks(2, _keyed, toy, 0), run_ranks(2, _keyed, toy, 1)
    for (loss, gradients, _, _), (again, repeated, keeps, is_reentrant) in zip(without, recomputed, strict=True):
        assert keeps and not is_reentrant
        assert loss == again
        assert all(torch.equal(gradients[name], repeated[name]) for name in gradients)


def _choice(rank: int) -> list[tuple[str, bool]]:
    seen = []
    for use_reentrant in (None, True, False):
        pipeline = {} if use_reentrant is None else {"use_reentrant": use_reentrant}
        module = make_engine(Toy(pipeline={**pipeline, "activation_checkpoint_interval": 1}), 1).module
        seen.append((module.activation_checkpoint_func.__name__, recomputes_reentrantly(module)))
        module.activation_checkpoint_func = functools.partial(checkpointing.checkpoint)
        assert recomputes_reentrantly(module)
        module.activation_checkpoint_interval = 0
        assert not recomputes_reentrantly(module)
    return seen


def test_the_json_chooses_between_deepspeeds_functions() -> None:
    assert run_ranks(1, _choice) == [
        [("checkpoint", True), ("checkpoint", True), ("non_reentrant_checkpoint", False)],
    ]


WAITING = {
    "in parts": {"partition_activations": True},
    "on the host": {"checkpoint_in_cpu": True},
    "in buffers": {"partition_activations": True, "contiguous_checkpointing": True, "num_checkpoints": 1},
    "all three": {
        "partition_activations": True,
        "contiguous_checkpointing": True,
        "num_checkpoints": 1,
        "checkpoint_in_cpu": True,
    },
}
"""One checkpoint is too few for DeepSpeed's buffers, in which those of two micro-batches would wait."""


class Straight(Dense):
    """x W + b, which torch returns as a view where x has three dimensions."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)  # type: ignore[no-any-return]


class Straights(Toy):
    """Layers whose outputs are views."""

    def specs(self) -> list[Any]:
        return [LayerSpec(Straight, 10 + i, self.wide, self.dtype) for i in range(self.layers)]


def _mpu(grid: Any) -> Any:
    """Return as much of an mpu as DeepSpeed's ``configure`` asks for."""
    return SimpleNamespace(
        get_model_parallel_rank=grid.get_slice_parallel_rank,
        get_model_parallel_world_size=grid.get_slice_parallel_world_size,
        get_model_parallel_group=grid.get_slice_parallel_group,
    )


def _gradients_by_place(rank: int, toys: list[Toy], tensor_ranks: int) -> tuple[list[Any], list[str], list[int]]:
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("tds").addHandler(handler)
    tds.init_distributed("gloo", verbose=False)
    topology = PipeModelDataParallelTopology(num_pp=2, num_mp=tensor_ranks, num_dp=1)
    results, held = [], []
    for toy in toys:
        engine = make_engine(toy, 2, topology=topology)
        for how in WAITING.values():
            checkpointing.configure(_mpu(engine.grid) if tensor_ranks > 1 else None, **how)
            results.append(train(engine, toy))
            held.append(_Kept(torch.zeros(4, 2)).held.nbytes)
    return results, [line for line in lines if "recompute" in line], held[:2]


@pytest.mark.parametrize("tensor_ranks", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_gradients_are_those_without_recompute_wherever_inputs_wait(tensor_ranks: int) -> None:
    """DeepSpeed's function loses the gradients of layers that return views, and empties what layers pass on."""
    every = {"activation_checkpoint_interval": 1}
    toys = [
        Straights("chain", 6, wide=5, rows=3, micro_batches=3, options=every),
        Toy(
            "many", 5, micro_batches=3, options={**every, "checkpointable_layers": ["Mix", "Gather"]},
            pipeline={"schedule": "zb-h1"},
        ),
    ]  # fmt: skip
    ranks = run_ranks(2 * tensor_ranks, _gradients_by_place, toys, tensor_ranks)
    for index, toy in enumerate(toy for toy in toys for _ in WAITING):
        check_equal([results[index] for results, _, _ in ranks], toy, tolerance=1e-12)
    assert [len(lines) for _, lines, _ in ranks] == [len(toys), *[0] * (2 * tensor_ranks - 1)]
    assert f"1/{tensor_ranks} on each tensor rank, on the device" in ranks[0][1][0]
    assert [held for _, _, held in ranks] == [[32 // tensor_ranks, 32]] * len(ranks)


class Noisy(nn.Module):
    """A layer that draws from torch's generator, and works on its input in place; outputs of three dimensions."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.inner = Dense(seed, 6, torch.float64)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        x.add_(0.5)
        return self.inner.inner(nn.functional.dropout(x, 0.4)) * mask


def _run(recomputed: Any) -> tuple[list[torch.Tensor], float]:
    """Return the gradients of three layers through ``recomputed``, and a random number drawn afterwards."""
    torch.manual_seed(3)
    layers = [Noisy(seed) for seed in range(3)]
    x = leaf = torch.randn(2, 5, 6, dtype=torch.float64).requires_grad_()
    mask = torch.rand(5, 6, dtype=torch.float64)
    x = leaf * 1
    for layer in layers:
        x = recomputed(layer, x, mask)
    x.square().sum().backward()
    return [leaf.grad, *(p.grad for layer in layers for p in layer.parameters())], float(torch.rand(()))  # type: ignore[list-item]


@pytest.fixture
def configured() -> Iterator[Any]:
    yield lambda **how: vars(checkpointing).update(how)
    checkpointing._configure_defaults()


@pytest.mark.parametrize("flag", ["PARTITION_ACTIVATIONS", "CPU_CHECKPOINT"])
def test_masks_and_inputs_that_a_layer_changes_come_back(flag: str, configured: Any) -> None:
    wanted = _run(lambda layer, *inputs: layer(*inputs))
    configured(**{flag: True})
    gradients, drawn = _run(Recompute().checkpoint)
    assert drawn == wanted[1]
    assert all(torch.equal(got, want) for got, want in zip(gradients, wanted[0], strict=True)) and len(gradients) == 7


def test_inputs_are_let_go_and_one_that_all_runs_share_is_kept_once(configured: Any) -> None:
    configured(PARTITION_ACTIVATIONS=True)
    recompute, seen, shared = Recompute(), [], torch.ones(4)
    x = torch.ones(4, requires_grad=True) * 2
    for _ in range(3):
        seen.append(weakref.ref(x))
        x = recompute.checkpoint(lambda x, y: torch.tanh(x) * y, x, shared)
    assert [ref() is None for ref in seen] == [True, True, True]
    assert len(recompute._kept) == 1  # what is alive: the shared one
    kept = weakref.ref(recompute._kept[shared][1])
    gc.disable()
    try:
        x.sum().backward()
        del x, shared
        assert kept() is None  # with the graph, and by no collection
    finally:
        gc.enable()


def test_a_tensor_that_a_run_changes_is_kept_for_each(configured: Any) -> None:
    configured(PARTITION_ACTIVATIONS=True)
    recompute, shared = Recompute(), torch.ones(4)
    weight = torch.ones(4, requires_grad=True)
    for _ in range(3):
        total = recompute.checkpoint(lambda w, y: (w * w * y.mul_(2)).sum(), weight, shared)
        total.backward(retain_graph=True)
    assert weight.grad is not None and weight.grad.tolist() == [2.0 * (2 + 4 + 8)] * 4
    total.backward()  # once more, from what is kept still
    assert weight.grad.tolist() == [2.0 * (2 + 4 + 8 + 8)] * 4


def test_inputs_come_back_with_their_strides(configured: Any) -> None:
    """Of a transposed input, and of one that is expanded, torch saves other tensors than of a plain one."""
    configured(CPU_CHECKPOINT=True)
    layer = Straight(0, 6, torch.float64)
    for made in (torch.rand(2, 6, 3).double().transpose(1, 2), torch.rand(2, 1, 6).double().expand(2, 3, 6)):
        x = made.clone(memory_format=torch.preserve_format) if made.stride(1) else made
        assert not x.is_contiguous()
        recomputed = x.detach().requires_grad_()
        Recompute().checkpoint(layer, recomputed).square().sum().backward()
        plain = x.detach().requires_grad_()
        layer(plain).square().sum().backward()
        assert recomputed.grad is not None and torch.equal(recomputed.grad, plain.grad)


def _asked(rank: int) -> list[bool]:
    """Ask engines whose recompute is set by the JSON, by the module, and after ``initialize``."""
    said = []
    for pipeline in ({"use_reentrant": False}, {}):
        engine = make_engine(Toy(pipeline=pipeline), 1)
        said.append(engine._reentrant_activation_checkpointing())
        engine.module.set_checkpoint_interval(2)
        said.append(engine._reentrant_activation_checkpointing())
        assert (engine.module.activation_checkpoint_func is checkpointing.checkpoint) == (not pipeline)
        train(engine, Toy())
        assert (engine.module.activation_checkpoint_func is checkpointing.checkpoint) == (not pipeline)
    checkpointing.configure(None, partition_activations=True)
    return [*said, engine._reentrant_activation_checkpointing()]


def test_an_engine_says_whether_recompute_is_reentrant() -> None:
    """As it is set now: after ``initialize`` too, by the function that the JSON chose."""
    assert run_ranks(1, _asked) == [[False, False, False, True, False]]
