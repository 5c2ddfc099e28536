"""xIELU: an activation with a quadratic positive side, an exponential negative side, and two learned parameters."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F

BETA = 0.5
"""Slope at 0, and lower bound of the scale of the negative side."""
EPS = -1e-6
"""Largest argument of the exponential."""
INITIAL_SCALE = 0.8
"""Initial scale of both sides."""


def xielu(x: torch.Tensor, alpha_p: torch.Tensor, alpha_n: torch.Tensor) -> torch.Tensor:
    """Compute xIELU elementwise, in fp32 for 16-bit inputs.

    With the scales ``p = softplus(alpha_p)`` and ``n = BETA + softplus(alpha_n)``:

    | x | xielu(x) |
    |---|---|
    | > 0 | ``p x^2 + BETA x`` |
    | <= 0 | ``n (exp(min(x, EPS)) - 1 - x) + BETA x`` |

    Only ``x`` and the parameters are saved for backward.

    Shapes:
        x, output        any
        alpha_p, alpha_n [1]

    Source: Huang and Schlag 2024, "Deriving activation functions using integration".
    """
    if torch.compiler.is_compiling():
        return _forward(x, alpha_p, alpha_n)
    y: torch.Tensor = _XIELU.apply(x, alpha_p, alpha_n)
    return y


def inverse_softplus(y: float) -> float:
    """Return ``x`` such that softplus(x) = ``y``."""
    return math.log(math.expm1(y))


def _forward(x: torch.Tensor, alpha_p: torch.Tensor, alpha_n: torch.Tensor) -> torch.Tensor:
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    positive_scale = F.softplus(alpha_p.to(wide.dtype))
    negative_scale = BETA + F.softplus(alpha_n.to(wide.dtype))
    positive = positive_scale * wide * wide
    negative = negative_scale * (torch.expm1(wide.clamp(max=EPS)) - wide)
    return (torch.where(wide > 0, positive, negative) + BETA * wide).to(x.dtype)


class _XIELU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, alpha_p: torch.Tensor, alpha_n: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, alpha_p, alpha_n)
        return _forward(x, alpha_p, alpha_n)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        x, alpha_p, alpha_n = ctx.saved_tensors
        dtype = torch.promote_types(x.dtype, torch.float32)
        wide, grad, wide_alpha_p, wide_alpha_n = (y.to(dtype) for y in (x, grads[0], alpha_p, alpha_n))
        is_positive = wide > 0
        exponential = torch.expm1(wide.clamp(max=EPS))  # exp - 1
        negative_slope = torch.where(wide < EPS, exponential, -1.0)
        slope = torch.where(
            is_positive, 2.0 * F.softplus(wide_alpha_p) * wide, (BETA + F.softplus(wide_alpha_n)) * negative_slope
        )
        grad_p = (grad * torch.where(is_positive, wide * wide, 0.0)).sum()
        grad_n = (grad * torch.where(is_positive, 0.0, exponential - wide)).sum()
        return (
            (grad * (slope + BETA)).to(x.dtype),
            (grad_p * torch.sigmoid(wide_alpha_p)).to(alpha_p.dtype),
            (grad_n * torch.sigmoid(wide_alpha_n)).to(alpha_n.dtype),
        )
