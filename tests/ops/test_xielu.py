"""xIELU against its formula: values and gradients, in every format."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from megatron.ops.xielu import BETA, EPS, inverse_softplus, xielu


def make_inputs(dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return x on both sides of 0, with 0 and large values, and both parameters; all require gradients."""
    generator = torch.Generator().manual_seed(0)
    x = 2.0 * torch.randn(5, 7, generator=generator, dtype=torch.float64)
    x[0, :4] = torch.tensor([0.0, -30.0, 30.0, -1e-3])
    parameters = (torch.tensor([value], dtype=torch.float64) for value in (0.3, -0.4))
    x, alpha_p, alpha_n = (tensor.to(dtype).requires_grad_() for tensor in (x, *parameters))
    return x, alpha_p, alpha_n


def formula(x: torch.Tensor, alpha_p: torch.Tensor, alpha_n: torch.Tensor) -> torch.Tensor:
    positive = F.softplus(alpha_p) * x * x
    negative = (BETA + F.softplus(alpha_n)) * (torch.expm1(torch.clamp(x, max=EPS)) - x)
    return torch.where(x > 0, positive, negative) + BETA * x


def test_values_and_gradients_match_formula() -> None:
    inputs, reference_inputs = make_inputs(), make_inputs()
    weights = torch.randn(5, 7, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    y, expected = xielu(*inputs), formula(*reference_inputs)
    (y * weights).sum().backward()
    (expected * weights).sum().backward()
    assert (y - expected).abs().max() <= 1e-14 * expected.abs().max()
    for actual, reference in zip(inputs, reference_inputs, strict=True):
        assert actual.grad is not None and reference.grad is not None
        assert (actual.grad - reference.grad).abs().max() <= 1e-13 * reference.grad.abs().max()
    smooth = [tensor.detach().clone() for tensor in inputs]
    smooth[0][0, 0] = 0.5  # the slope jumps near 0
    assert torch.autograd.gradcheck(xielu, tuple(tensor.requires_grad_() for tensor in smooth))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_rounded_once(dtype: torch.dtype) -> None:
    inputs = make_inputs(dtype)
    expected = formula(*(tensor.detach().float() for tensor in inputs)).to(dtype)
    y = xielu(*inputs)
    assert y.dtype == dtype and y.equal(expected)
    y.sum().backward()
    assert all(tensor.grad is not None and tensor.grad.dtype == dtype for tensor in inputs)


def test_inverse_softplus() -> None:
    assert math.log1p(math.exp(inverse_softplus(0.3))) == pytest.approx(0.3, rel=1e-14)
