"""Adaptive Muon on one process: AdaMuon and NorMuon by their formulas, and against emerging-optimizers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from megatron.config import parse
from megatron.config.newton_schulz import step_coefficients
from megatron.mpu.matrices import set_matrices
from megatron.optim import MuonArgs, build_optimizer
from megatron.optim.lr_scheduler import set_learning_rate
from megatron.optim.moment2 import AdaptiveArgs
from megatron.optim.newton_schulz import newton_schulz
from megatron.training.state_records import make_moments
from tests.helpers.emerging import emerging_module
from tests.helpers.whole import random_tensor

LR, DECAY = 0.02, 0.1
SHAPES = [(12, 8), (8, 12), (8, 8)]
METHODS = ["adamuon", "normuon"]
MEGATRON = MuonArgs(
    momentum=0.9, nesterov=False, coefficient_type="quintic", fp32_matmul_prec="medium", scale_mode="spectral"
)


def make_weights(dtype: torch.dtype, shapes: Sequence[tuple[int, int]] = SHAPES) -> list[nn.Parameter]:
    return [nn.Parameter(random_tensor(seed, *shape).to(dtype)) for seed, shape in enumerate(shapes)]


def set_random_grads(weights: Sequence[nn.Parameter], step: int) -> None:
    for idx, weight in enumerate(weights):
        weight.grad = random_tensor(100 * (step + 1) + idx, *weight.shape).to(weight.dtype)


def train_ours(args: MuonArgs, dtype: torch.dtype, steps: int) -> tuple[list[nn.Parameter], Any]:
    weights = make_weights(dtype)
    for weight in weights:
        set_matrices(weight)
    optimizer = build_optimizer(weights, name="muon", lr=LR, weight_decay=DECAY, dtype=dtype, muon=args)
    for step in range(steps):
        set_random_grads(weights, step)
        set_learning_rate(optimizer, rate_of(step))
        optimizer.step()
    return weights, optimizer


def rate_of(step: int) -> float:
    """Return the learning rate of ``step``: 0 in the first one, as in a warm-up of Megatron."""
    return LR if step else 0.0


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("nesterov", [False, True])
def test_steps_follow_formula(method: str, nesterov: bool) -> None:
    """In fp64 with products in fp64, against the formulas written out on full matrices."""
    adaptive = AdaptiveArgs(method, beta2=0.8, eps=1e-4)
    name = "quintic" if nesterov else "polar_express"
    args = MuonArgs(
        nesterov=nesterov, coefficient_type=name, fp32_matmul_prec="highest", scale_mode="original", adaptive=adaptive
    )
    weights, _ = train_ours(args, torch.float64, 3)
    expected = make_weights(torch.float64)
    momenta, moments = ([torch.zeros_like(weight) for weight in expected] for _ in range(2))
    for step in range(3):
        set_random_grads(expected, step)
        for weight, momentum, v in zip(expected, momenta, moments, strict=True):
            assert weight.grad is not None
            momentum.mul_(0.95).add_(0.05 * weight.grad)
            update = 0.95 * momentum + 0.05 * weight.grad if nesterov else momentum
            o = newton_schulz(update, step_coefficients(name, 5), "highest")
            m, n = o.shape
            if method == "adamuon":
                v.mul_(0.8).add_(0.2 * o**2)
                normalized = o / (v.sqrt() + 1e-4)
            else:
                means = (o**2).mean(1 if m >= n else 0, keepdim=True)
                v.mul_(0.8).add_(0.2 * means)
                normalized = o / v.clamp(min=1e-4).sqrt()
                normalized = normalized * o.norm() / normalized.norm()
            lr = rate_of(step)
            weight.data = (1 - lr * DECAY) * weight.data - lr * max(1, m / n) ** 0.5 * normalized
    for weight, other in zip(weights, expected, strict=True):
        assert (weight - other).abs().max() <= 1e-13


@pytest.mark.slow
@pytest.mark.parametrize("method", ["none", *METHODS])
@pytest.mark.parametrize("precision", ["medium", "highest"])
@pytest.mark.parametrize("mode", ["spectral", "original"])
def test_steps_equal_emerging_optimizers(method: str, precision: str, mode: str) -> None:
    """Momentum and second moments bit for bit; weights up to the rounding of the decay and of the scale."""
    module = emerging_module("orthogonalized_optimizers")
    args = replace(MEGATRON, fp32_matmul_prec=precision, scale_mode=mode, extra_scale_factor=0.2)
    settings: dict[str, Any] = {
        "lr": LR, "momentum": 0.9, "weight_decay": DECAY, "fp32_matmul_prec": precision, "extra_scale_factor": 0.2,
        "coefficient_type": "quintic", "scale_mode": "shape_scaling" if mode == "original" else mode,
    }  # fmt: skip
    expected = make_weights(torch.float32)
    if method == "none":
        reference = module.Muon(expected, **settings)
    else:
        args = replace(args, adaptive=AdaptiveArgs(method))
        reference = module.AdaptiveMuon(expected, **settings, moment2_method=method)
    for step in range(20):
        set_random_grads(expected, step)
        reference.param_groups[0]["lr"] = rate_of(step)
        reference.step()
    weights, optimizer = train_ours(args, torch.float32, 20)
    for weight, other in zip(weights, expected, strict=True):
        assert (weight - other).abs().max() <= 4e-6 * other.abs().max()
        state, expected_state = optimizer.inner.state[weight], reference.state[other]
        assert set(state) == set(expected_state)
        for name, value in expected_state.items():
            assert torch.equal(state[name], value.view_as(state[name])), name


@pytest.mark.parametrize(("method", "shapes"), [("adamuon", SHAPES), ("normuon", [(12,), (12,), (8,)])])
def test_making_state_moves_no_weight(method: str, shapes: list[tuple[int, ...]]) -> None:
    args = MuonArgs(adaptive=AdaptiveArgs(method))
    weights, optimizer = train_ours(args, torch.float32, 0)
    before = [weight.detach().clone() for weight in weights]
    make_moments(optimizer)
    assert all(torch.equal(weight, old) for weight, old in zip(weights, before, strict=True))
    moments = [optimizer.inner.state[weight]["moment2_buffer"] for weight in weights]
    assert [tuple(moment2.shape) for moment2 in moments] == shapes
    assert not any(moment2.any() for moment2 in moments)


def test_match_rms_adamw_scale_is_that_of_the_update_rms() -> None:
    """AdaMuon's updates have an RMS of 1, NorMuon's that of Muon."""
    adamuon, normuon = (MuonArgs(adaptive=AdaptiveArgs(method)) for method in METHODS)
    assert adamuon.scale(16, 64) == 0.2 and normuon.scale(16, 64) == MuonArgs().scale(16, 64) == 0.2 * 8


def test_flags_select_state_layout() -> None:
    words = "--num-layers 1 --hidden-size 8 --num-attention-heads 2 --vocab-size 61 --data-path none --device cpu"

    def state_type(flags: str) -> str:
        return parse([*words.split(), *flags.split()], world_size=1).optimizer.state_type

    assert state_type("--optimizer adaptive_muon") == "adamuon"
    assert state_type("--optimizer adaptive_muon --adaptive-muon-moment2-method normuon") == "muon"
