"""Recompute with dropout whose masks are found by position: only the user's own function can bring them back."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import pytest
import torch
from deepspeed.runtime.activation_checkpointing import checkpointing
from torch import nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import tds
from tds import assembly
from tds.pipe import LayerSpec, PipelineModule
from tests.harness import run_ranks
from tests.tds.toys import Dense, Tensors, Toy, make_engine, train


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
    return float(loss), gradients, keeps, assembly.recomputes_reentrantly(module)


@pytest.mark.parametrize("pipeline", [{}, {"use_reentrant": False}])
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
        seen.append((module.activation_checkpoint_func.__name__, assembly.recomputes_reentrantly(module)))
        module.activation_checkpoint_func = functools.partial(checkpointing.checkpoint)
        assert assembly.recomputes_reentrantly(module)
        module.activation_checkpoint_interval = 0
        assert not assembly.recomputes_reentrantly(module)
    return seen


def test_the_json_chooses_between_deepspeeds_functions() -> None:
    assert run_ranks(1, _choice) == [
        [("checkpoint", True), ("checkpoint", True), ("non_reentrant_checkpoint", False)],
    ]
