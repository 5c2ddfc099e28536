"""Lists and dicts come through recompute as they are, with the gradients of one process to the bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from deepspeed.runtime.activation_checkpointing import checkpointing

from tds.deepspeed.recompute import preserve_structure
from tds.pipe import PipelineModule
from tests.helpers.harness import run_ranks
from tests.helpers.toys import make_engine, train_batch
from tests.tds.test_structures import Combine, Fork, Join, Structures, _assert_equals_reference

CHECKPOINTS = {"reentrant": checkpointing.checkpoint, "non-reentrant": checkpointing.non_reentrant_checkpoint}


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_recompute_of_dicts_and_lists_is_bitwise_identical(name: str) -> None:
    layers = [Fork(6), Combine(6), Join(6)]
    inputs = torch.randn(2, 3, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    gradients = []
    for run in (preserve_structure(CHECKPOINTS[name]), lambda layer, x: layer(x)):
        x = inputs.clone().requires_grad_()
        value: Any = x
        for layer in layers:
            value = run(layer, value)
        value.sum().backward()
        gradients.append([x.grad, *(p.grad for layer in layers for p in layer.parameters())])
        for layer in layers:
            layer.zero_grad()
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True)) and len(gradients[0]) == 8


def _train(rank: int, toy: Structures) -> Any:
    module = PipelineModule(
        toy.layer_specs(),
        num_stages=2,
        loss_fn=toy.loss_fn,
        partition_method=[0, 2, 3],
        activation_checkpoint_interval=1,
        activation_checkpoint_func=preserve_structure(checkpointing.non_reentrant_checkpoint),
    )
    return train_batch(make_engine(toy, 2, module=module), toy)


def test_pipeline_recomputes_dicts_and_lists() -> None:
    toy = Structures(num_layers=3)
    _assert_equals_reference(run_ranks(2, _train, toy), toy)


def test_wrapped_checkpoint_function_is_accessible() -> None:
    assert preserve_structure(checkpointing.checkpoint).__wrapped__ is checkpointing.checkpoint  # type: ignore[attr-defined]
