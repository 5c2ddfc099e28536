"""Root-mean-square normalisation."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F


def rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """Return ``x / sqrt(mean(x^2) + epsilon) * weight`` over the last dimension; 16-bit numbers are summed in fp32.

    Shapes:
        x, output [..., h]
        weight    [h]

    Source: Zhang and Sennrich 2019, "Root mean square layer normalization".
    """
    if x.device.type == "cpu":
        return _RMSNorm.apply(x, weight, epsilon)
    return F.rms_norm(x, (x.shape[-1],), weight, epsilon)


class _RMSNorm(torch.autograd.Function):
    """Forward keeps its input and a number for each row. torch has a fused kernel on GPUs only."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
        dtype = torch.promote_types(x.dtype, torch.float32)
        wide = x.to(dtype)
        norm = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        factor = norm.square_().div_(x.shape[-1]).add_(epsilon).rsqrt_()  # [..., 1]
        ctx.save_for_backward(x, weight, factor)
        return (wide * factor).mul_(weight).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        x, weight, factor = ctx.saved_tensors
        wide, wide_weight, grad = (y.to(factor.dtype) for y in (x, weight, grads[0]))
        products = (grad * wide).flatten(0, -2)  # [rows, h]
        to_weight = products.t() @ factor.flatten()
        along = (products @ wide_weight).view_as(factor).mul_(factor.pow(3)).div_(-x.shape[-1])  # what only scales x
        to_x = (grad * wide_weight).mul_(factor).addcmul_(wide, along)
        return to_x.to(x.dtype), to_weight.to(weight.dtype), None
