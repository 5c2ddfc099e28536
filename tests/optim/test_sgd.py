"""SGD with momentum equals ``torch.optim.SGD``, in every type of master and after a restored state."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.arguments import parse
from megatron.errors import CheckpointError
from megatron.optim import MixedPrecisionOptimizer, build_optimizer
from megatron.training import checkpoint_checks

STEPS = 5


def gradients(step: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((3, 4), (4,))]


def weights() -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(value) for value in gradients(99)]


def run_step(optimizer: MixedPrecisionOptimizer, parameters: list[torch.nn.Parameter], step_idx: int) -> None:
    for parameter, gradient in zip(parameters, gradients(step_idx), strict=True):
        optimizer.gradient_of(parameter).copy_(gradient)  # type: ignore[union-attr]
    optimizer.step()


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_updates_match_torch_sgd(momentum: float) -> None:
    parameters, reference_params = weights(), weights()
    optimizer = build_optimizer(
        parameters, name="sgd", lr=0.1, weight_decay=0.01, momentum=momentum, dtype=torch.float64
    )  # fmt: skip
    groups = [
        {"params": reference_params[:1], "weight_decay": 0.01},
        {"params": reference_params[1:], "weight_decay": 0.0},
    ]
    reference = torch.optim.SGD(groups, lr=0.1, momentum=momentum)
    for step_idx in range(STEPS):
        run_step(optimizer, parameters, step_idx)
        for parameter, gradient in zip(reference_params, gradients(step_idx), strict=True):
            parameter.grad = gradient
        reference.step()
        assert all(torch.equal(actual, expected) for actual, expected in zip(parameters, reference_params, strict=True))
    keys = {key for state in optimizer.inner.state.values() for key, value in state.items() if value is not None}
    assert keys == ({"momentum_buffer"} if momentum else set())


def test_momentum_survives_state_dict() -> None:
    first, second = weights(), weights()
    first_optimizer, second_optimizer = (
        build_optimizer(params, name="sgd", momentum=0.9, dtype=torch.float64) for params in (first, second)
    )
    run_step(first_optimizer, first, 0)
    second_optimizer.load_state_dict(first_optimizer.state_dict())
    for optimizer, parameters in ((first_optimizer, first), (second_optimizer, second)):
        run_step(optimizer, parameters, 1)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize(
    ("line", "state"),
    [("", "sgd"), ("--sgd-momentum 0.9", "momentum"), ("--optimizer adamw --sgd-momentum 0.9", "adamw")],
)
def test_state_type_follows_momentum_and_optimizer(line: str, state: str) -> None:
    config = parse(f"--optimizer sgd {line}".split(), world_size=1, env={})
    assert config.optimizer.state_type == state
    assert ("--sgd-momentum 0.9" in config.ignored) == (state == "adamw")


@pytest.mark.parametrize(
    ("names", "momentum", "updates", "is_rejected"),
    [
        ([], 0.9, 3, True),
        ([], 0.9, 0, False),
        ([], 0.0, 3, False),
        (["optimizer/momentum_buffer/head.weight"], 0.9, 3, False),
    ],
)
def test_checkpoint_without_momentum_is_rejected(
    names: list[str], momentum: float, updates: int, is_rejected: bool
) -> None:
    """It was saved with --no-save-optim; SGD counts no steps of its own."""
    state = {
        "optimizer_steps": 0,
        "progress": {"step": 3, "updates": updates, "samples_consumed": 12},
        "config": {"optimizer": {"optimizer": "sgd", "sgd_momentum": momentum}},
    }
    checkpoint: Any = SimpleNamespace(metadata=state, names=lambda: names, path="run")
    if is_rejected:
        with pytest.raises(CheckpointError, match="contains no optimizer state"):
            checkpoint_checks.check_moments(checkpoint)
    else:
        checkpoint_checks.check_moments(checkpoint)
