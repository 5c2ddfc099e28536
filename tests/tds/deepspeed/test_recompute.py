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
from tds.deepspeed.recompute import Recompute, _SavedInput, recomputes_reentrantly
from tds.pipe import LayerSpec, PipelineModule
from tests.helpers.harness import run_ranks
from tests.helpers.toys import Dense, Tensors, Toy, check_equal, make_engine, train_batch


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
        saved_position, Masks.position = Masks.position, position
        try:
            return function(*inputs)
        finally:
            Masks.position = saved_position

    return torch_checkpoint(run, *args, use_reentrant=False, preserve_rng_state=False)


def _train_with_keyed_dropout(rank: int, toy: Toy, interval: int) -> tuple[float, Tensors, bool, bool]:
    tds.init_distributed("gloo", verbose=False)
    module = PipelineModule(
        [LayerSpec(KeyedDropout, 10 + i, toy.hidden_size, toy.dtype) for i in range(toy.num_layers)],
        num_stages=2,
        partition_method="uniform",
        loss_fn=toy.loss_fn,
        activation_checkpoint_interval=interval,
        activation_checkpoint_func=keyed_checkpoint,
    )
    engine = make_engine(toy, 2, module=module)
    engine.on_micro_batch = functools.partial(setattr, Masks, "position")
    loss, gradients, _ = train_batch(engine, toy)
    is_user_function = inspect.unwrap(module.activation_checkpoint_func) is keyed_checkpoint
    return float(loss), gradients, is_user_function, recomputes_reentrantly(module)


@pytest.mark.parametrize("pipeline", [pytest.param({}, marks=pytest.mark.slow), {"use_reentrant": False}])
def test_user_checkpoint_function_is_retained_with_its_masks(pipeline: dict[str, Any]) -> None:
    toy = Toy("chain", pipeline=pipeline)
    plain, recomputed = run_ranks(2, _train_with_keyed_dropout, toy, 0), run_ranks(2, _train_with_keyed_dropout, toy, 1)
    for (loss, gradients, _, _), (recomputed_loss, recomputed_gradients, is_user_function, is_reentrant) in zip(
        plain, recomputed, strict=True
    ):
        assert is_user_function and not is_reentrant
        assert loss == recomputed_loss
        assert all(torch.equal(gradients[name], recomputed_gradients[name]) for name in gradients)


def _collect_checkpoint_functions(rank: int) -> list[tuple[str, bool]]:
    choices = []
    for use_reentrant in (None, True, False):
        pipeline = {} if use_reentrant is None else {"use_reentrant": use_reentrant}
        module = make_engine(Toy(pipeline={**pipeline, "activation_checkpoint_interval": 1}), 1).module
        choices.append((module.activation_checkpoint_func.__name__, recomputes_reentrantly(module)))
        module.activation_checkpoint_func = functools.partial(checkpointing.checkpoint)
        assert recomputes_reentrantly(module)
        module.activation_checkpoint_interval = 0
        assert not recomputes_reentrantly(module)
    return choices


def test_use_reentrant_selects_checkpoint_function() -> None:
    assert run_ranks(1, _collect_checkpoint_functions) == [
        [("checkpoint", True), ("checkpoint", True), ("non_reentrant_checkpoint", False)],
    ]


CHECKPOINT_CONFIGS = {
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


class LinearOnly(Dense):
    """x W + b, which torch returns as a view where x has three dimensions."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)  # type: ignore[no-any-return]


class LinearOnlyToy(Toy):
    """Layers whose outputs are views."""

    def layer_specs(self) -> list[Any]:
        return [LayerSpec(LinearOnly, 10 + i, self.hidden_size, self.dtype) for i in range(self.num_layers)]


def _make_mpu(grid: Any) -> Any:
    """Return as much of an mpu as DeepSpeed's ``configure`` asks for."""
    return SimpleNamespace(
        get_model_parallel_rank=grid.get_slice_parallel_rank,
        get_model_parallel_world_size=grid.get_slice_parallel_world_size,
        get_model_parallel_group=grid.get_slice_parallel_group,
    )


def _train_with_checkpoint_configs(
    rank: int, toys: list[Toy], tensor_ranks: int
) -> tuple[list[Any], list[str], list[int]]:
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("tds").addHandler(handler)
    tds.init_distributed("gloo", verbose=False)
    topology = PipeModelDataParallelTopology(num_pp=2, num_mp=tensor_ranks, num_dp=1)
    results, saved_bytes = [], []
    for toy in toys:
        engine = make_engine(toy, 2, topology=topology)
        for config in CHECKPOINT_CONFIGS.values():
            checkpointing.configure(_make_mpu(engine.grid) if tensor_ranks > 1 else None, **config)
            results.append(train_batch(engine, toy))
            saved_bytes.append(_SavedInput(torch.zeros(4, 2)).buffer.nbytes)
    return results, [line for line in lines if "recompute" in line], saved_bytes[:2]


@pytest.mark.parametrize("tensor_ranks", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_gradients_equal_training_without_recompute(tensor_ranks: int) -> None:
    """DeepSpeed's function loses the gradients of layers that return views, and empties what layers pass on."""
    recompute_all = {"activation_checkpoint_interval": 1}
    toys = [
        LinearOnlyToy("chain", 6, hidden_size=5, micro_batch_size=3, num_micro_batches=3, options=recompute_all),
        Toy(
            "many", 5, num_micro_batches=3, options={**recompute_all, "checkpointable_layers": ["Mix", "Gather"]},
            pipeline={"schedule": "zb-h1"},
        ),
    ]  # fmt: skip
    ranks = run_ranks(2 * tensor_ranks, _train_with_checkpoint_configs, toys, tensor_ranks)
    for index, toy in enumerate(toy for toy in toys for _ in CHECKPOINT_CONFIGS):
        check_equal([results[index] for results, _, _ in ranks], toy, tolerance=1e-12)
    assert [len(lines) for _, lines, _ in ranks] == [len(toys), *[0] * (2 * tensor_ranks - 1)]
    assert f"1/{tensor_ranks} on each tensor rank, on the device" in ranks[0][1][0]
    assert [saved_bytes for _, _, saved_bytes in ranks] == [[32 // tensor_ranks, 32]] * len(ranks)


class Noisy(nn.Module):
    """A layer that draws from torch's generator, and works on its input in place; outputs of three dimensions."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.inner = Dense(seed, 6, torch.float64)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        x.add_(0.5)
        return self.inner.inner(nn.functional.dropout(x, 0.4)) * mask


def _run_layers(checkpoint_fn: Any) -> tuple[list[torch.Tensor], float]:
    """Return the gradients of three layers through ``checkpoint_fn``, and a random number drawn afterwards."""
    torch.manual_seed(3)
    layers = [Noisy(seed) for seed in range(3)]
    x = leaf = torch.randn(2, 5, 6, dtype=torch.float64).requires_grad_()
    mask = torch.rand(5, 6, dtype=torch.float64)
    x = leaf * 1
    for layer in layers:
        x = checkpoint_fn(layer, x, mask)
    x.square().sum().backward()
    return [leaf.grad, *(p.grad for layer in layers for p in layer.parameters())], float(torch.rand(()))  # type: ignore[list-item]


@pytest.fixture
def configured() -> Iterator[Any]:
    yield lambda **options: vars(checkpointing).update(options)
    checkpointing._configure_defaults()


@pytest.mark.parametrize("flag", ["PARTITION_ACTIVATIONS", "CPU_CHECKPOINT"])
def test_recompute_restores_rng_and_in_place_modified_inputs(flag: str, configured: Any) -> None:
    expected = _run_layers(lambda layer, *inputs: layer(*inputs))
    configured(**{flag: True})
    gradients, random_number = _run_layers(Recompute().checkpoint)
    assert random_number == expected[1]
    assert (
        all(torch.equal(got, expected_gradient) for got, expected_gradient in zip(gradients, expected[0], strict=True))
        and len(gradients) == 7
    )


def test_inputs_are_freed_and_shared_input_is_saved_once(configured: Any) -> None:
    configured(PARTITION_ACTIVATIONS=True)
    recompute, refs, shared = Recompute(), [], torch.ones(4)
    x = torch.ones(4, requires_grad=True) * 2
    for _ in range(3):
        refs.append(weakref.ref(x))
        x = recompute.checkpoint(lambda x, y: torch.tanh(x) * y, x, shared)
    assert [ref() is None for ref in refs] == [True, True, True]
    assert len(recompute._saved_inputs) == 1  # what is alive: the shared one
    saved_input = weakref.ref(recompute._saved_inputs[shared][1])
    gc.disable()
    try:
        x.sum().backward()
        del x, shared
        assert saved_input() is None  # with the graph, and by no collection
    finally:
        gc.enable()


def test_modified_tensor_is_saved_for_every_run(configured: Any) -> None:
    configured(PARTITION_ACTIVATIONS=True)
    recompute, shared = Recompute(), torch.ones(4)
    weight = torch.ones(4, requires_grad=True)
    for _ in range(3):
        total = recompute.checkpoint(lambda w, y: (w * w * y.mul_(2)).sum(), weight, shared)
        total.backward(retain_graph=True)
    assert weight.grad is not None and weight.grad.tolist() == [2.0 * (2 + 4 + 8)] * 4
    total.backward()  # once more, from what is kept still
    assert weight.grad.tolist() == [2.0 * (2 + 4 + 8 + 8)] * 4


def test_restored_inputs_preserve_strides(configured: Any) -> None:
    """Of a transposed input, and of one that is expanded, torch saves other tensors than of a plain one."""
    configured(CPU_CHECKPOINT=True)
    layer = LinearOnly(0, 6, torch.float64)
    for original in (torch.rand(2, 6, 3).double().transpose(1, 2), torch.rand(2, 1, 6).double().expand(2, 3, 6)):
        x = original.clone(memory_format=torch.preserve_format) if original.stride(1) else original
        assert not x.is_contiguous()
        recomputed = x.detach().requires_grad_()
        Recompute().checkpoint(layer, recomputed).square().sum().backward()
        plain = x.detach().requires_grad_()
        layer(plain).square().sum().backward()
        assert recomputed.grad is not None and torch.equal(recomputed.grad, plain.grad)


def _collect_reentrancy(rank: int) -> list[bool]:
    """Ask engines whose recompute is set by the JSON, by the module, and after ``initialize``."""
    results = []
    for pipeline in ({"use_reentrant": False}, {}):
        engine = make_engine(Toy(pipeline=pipeline), 1)
        results.append(engine._reentrant_activation_checkpointing())
        engine.module.set_checkpoint_interval(2)
        results.append(engine._reentrant_activation_checkpointing())
        assert (engine.module.activation_checkpoint_func is checkpointing.checkpoint) == (not pipeline)
        train_batch(engine, Toy())
        assert (engine.module.activation_checkpoint_func is checkpointing.checkpoint) == (not pipeline)
    checkpointing.configure(None, partition_activations=True)
    return [*results, engine._reentrant_activation_checkpointing()]


def test_engine_reports_reentrant_recompute() -> None:
    """As it is set now: after ``initialize`` too, by the function that the JSON chose."""
    assert run_ranks(1, _collect_reentrancy) == [[False, False, False, True, False]]
