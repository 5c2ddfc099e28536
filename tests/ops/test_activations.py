"""Activation functions against their formulas."""

from __future__ import annotations

import math

import pytest
import torch

from megatron.ops.activations import ACTIVATIONS, activation, is_gated

X = torch.linspace(-4, 4, 33, dtype=torch.float64)


def test_gelu_matches_normal_cdf_formula():
    expected = X * 0.5 * (1 + torch.erf(X / math.sqrt(2)))
    assert (activation("gelu")(X) - expected).abs().max() <= 1e-14


def test_gelu_tanh_matches_gpt2_approximation():
    expected = 0.5 * X * (1 + torch.tanh(math.sqrt(2 / math.pi) * (X + 0.044715 * X**3)))
    assert (activation("gelu-tanh")(X) - expected).abs().max() <= 1e-14
    assert (activation("gelu-tanh")(X) - activation("gelu")(X)).abs().max() > 1e-5


def test_relu_clamps_at_zero():
    assert torch.equal(activation("relu")(X), torch.where(X > 0, X, 0.0))


def test_gated_names_return_gate_activation():
    assert torch.equal(activation("gated-gelu")(X), activation("gelu-tanh")(X))
    assert (activation("gated-silu")(X) - X / (1 + (-X).exp())).abs().max() <= 1e-14
    assert {name for name in ACTIVATIONS if is_gated(name)} == {"gated-gelu", "gated-quick-gelu", "gated-silu"}


def test_rejects_unknown_activation_and_lists_known():
    with pytest.raises(
        ValueError,
        match="one of gated-gelu, gated-quick-gelu, gated-silu, gelu, gelu-tanh, relu, silu, squared-relu, got",
    ):
        activation("swish")
