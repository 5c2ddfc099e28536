"""Newton-Schulz steps: bitwise equal to torch's and emerging-optimizers', and their coefficients."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron.config.newton_schulz import COEFFICIENTS, step_coefficients
from megatron.optim.newton_schulz import newton_schulz, result_dtype
from tests.helpers.emerging import emerging_module

SHAPES = [(24, 8), (8, 24), (8, 8)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("steps", [2, 5])
def test_bf16_steps_equal_torch_muon_update(shape: tuple[int, int], steps: int) -> None:
    """Without momentum, decay and scale, torch's first step subtracts the orthogonalized gradient."""
    gradient = torch.randn(shape, dtype=torch.float64)
    weight = torch.nn.Parameter(torch.zeros(shape, dtype=torch.float64))
    weight.grad = gradient.clone()
    settings: dict[str, Any] = {"lr": 1.0, "momentum": 0.0, "nesterov": False, "weight_decay": 0.0, "ns_steps": steps}
    torch.optim.Muon([weight], adjust_lr_fn="original", **settings).step()
    orthogonalized = newton_schulz(gradient, step_coefficients("simple", steps))
    assert orthogonalized.dtype == torch.bfloat16
    assert torch.equal(weight.detach(), -(max(1, shape[0] / shape[1]) ** 0.5) * orthogonalized.double())


@pytest.mark.slow
@pytest.mark.parametrize("name", COEFFICIENTS)
def test_coefficients_equal_emerging_optimizers(name: str) -> None:
    utils = emerging_module("orthogonalized_optimizers.muon_utils")
    mode = "repeat_last" if name in ("polar_express", "cans", "deepseekv4") else "cycle"
    for steps in (1, 3, 5, 8, 12):
        expected = utils.get_coefficient_iterator(steps, utils._COEFFICIENT_SETS[name], mode)
        assert step_coefficients(name, steps) == list(expected)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["medium", "high", "highest"])
@pytest.mark.parametrize("name", COEFFICIENTS)
def test_steps_equal_emerging_optimizers_bitwise(name: str, precision: str) -> None:
    utils, precisions = emerging_module("orthogonalized_optimizers.muon_utils"), emerging_module("utils")
    for shape in SHAPES:
        update = torch.randn(shape)
        with precisions.fp32_matmul_precision(precision):
            expected = utils.newton_schulz(update, 6, name)
        actual = newton_schulz(update, step_coefficients(name, 6), precision)
        assert actual.dtype == result_dtype(precision, torch.float32)
        assert torch.equal(actual.float(), expected), shape


@pytest.mark.parametrize("name", COEFFICIENTS)
def test_singular_values_approach_one(name: str) -> None:
    """With ten steps in fp64. The sets that converge come within 1 %, the others within their known bounds."""
    update = torch.randn(16, 48, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    values = torch.linalg.svdvals(newton_schulz(update, step_coefficients(name, 10), "highest"))
    bound = 0.01 if name in ("polar_express", "deepseekv4") else 0.45
    assert (values - 1).abs().max() < bound


def test_unknown_number_of_steps_repeats_the_period_or_the_last() -> None:
    assert step_coefficients("quintic", 7)[5:] == step_coefficients("quintic", 2)
    assert step_coefficients("polar_express", 10)[7:] == [(1.875, -1.25, 0.375)] * 3
    assert step_coefficients("deepseekv4", 10)[8:] == [(2.0, -1.5, 0.5)] * 2


def test_zero_matrix_stays_zero() -> None:
    for precision in ("bf16", "medium", "highest"):
        assert not newton_schulz(torch.zeros(4, 6), step_coefficients("simple", 5), precision).any()
