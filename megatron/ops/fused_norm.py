"""LayerNorm and RMSNorm of the sum of a residual connection and a branch, by Triton kernels."""

from __future__ import annotations

from typing import Any

import torch

from megatron import triton_launch

KERNELS = "megatron.ops.norm_kernels"
MAX_WIDTH = 8192
"""Maximum size of a row, which a program keeps in registers."""
ROWS_PER_PROGRAM = 16
"""Rows whose gradients of weight and bias a program of the backward sums."""


def add_and_norm(
    x: torch.Tensor,
    branch: torch.Tensor | None,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    epsilon: float,
    *,
    is_centred: bool,
    is_offset: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute ``x + branch`` (``x`` if ``branch`` is None) and its norm over the last dimension.

    Backward adds both outputs' gradients in the same kernel. Weight and bias gradients are summed in fp32.

    Shapes:
        x, branch, 2 x output [..., h], h at most ``MAX_WIDTH``
        weight, bias          [h]

    Args:
        is_centred: subtract the mean: LayerNorm, otherwise RMSNorm.
        is_offset: the weight is the scale minus 1.
    """
    total, normed = _AddAndNorm.apply(x, branch, weight, bias, epsilon, is_centred, is_offset)
    return total, normed


class _AddAndNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, branch: torch.Tensor | None, weight: torch.Tensor, bias: torch.Tensor | None,
        epsilon: float, is_centred: bool, is_offset: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        rows, width = x.contiguous(), x.shape[-1]
        branch_rows = rows if branch is None else branch.contiguous()
        total = rows if branch is None else torch.empty_like(rows)
        normed = torch.empty_like(rows)
        rstd = rows.new_empty(rows.numel() // width, dtype=torch.float32)
        mean = torch.empty_like(rstd) if is_centred else rstd  # not used otherwise
        if len(rstd):
            written = (normed, rstd, *((mean,) if is_centred else ()), *(() if branch is None else (total,)))
            triton_launch.launch(
                f"{KERNELS}:norm_forward_kernel", (len(rstd),), rows, branch_rows, weight,
                weight if bias is None else bias, total, normed, mean, rstd, width, epsilon, writes=written,
                HAS_BRANCH=branch is not None, IS_CENTRED=is_centred, IS_OFFSET=is_offset, HAS_BIAS=bias is not None,
                BLOCK=triton_launch.power_of_two(width), num_warps=num_warps(width, 16),
            )  # fmt: skip
        ctx.is_centred, ctx.is_offset, ctx.has_bias, ctx.has_branch = (
            is_centred,
            is_offset,
            bias is not None,
            (branch is not None),
        )
        ctx.save_for_backward(total, weight, mean, rstd)
        ctx.set_materialize_grads(False)
        return x if branch is None else total, normed

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, total_grad: torch.Tensor | None, grad: torch.Tensor | None) -> Any:
        total, weight, mean, rstd = ctx.saved_tensors
        if grad is None:
            return total_grad, total_grad if ctx.has_branch else None, None, None, None, None, None
        x_grad, width = torch.empty_like(total), len(weight)
        num_programs = -(-len(rstd) // ROWS_PER_PROGRAM)
        param_grads = total.new_empty(2 if ctx.has_bias else 1, num_programs, width, dtype=torch.float32)
        partial_grads = param_grads.unbind()
        if num_programs:
            grad = grad.contiguous()
            triton_launch.launch(
                f"{KERNELS}:norm_backward_kernel", (num_programs,), grad,
                grad if total_grad is None else total_grad.contiguous(), total, weight, mean, rstd, x_grad,
                partial_grads[0], partial_grads[-1], len(rstd), width, writes=(x_grad, *partial_grads),
                HAS_TOTAL_GRAD=total_grad is not None, IS_CENTRED=ctx.is_centred, IS_OFFSET=ctx.is_offset,
                HAS_BIAS=ctx.has_bias, ROWS=ROWS_PER_PROGRAM, BLOCK=triton_launch.power_of_two(width),
                num_warps=num_warps(width, 8),
            )  # fmt: skip
        weight_grad, *bias_grads = param_grads.sum(1).to(weight.dtype)  # [1 or 2, h]
        return x_grad, x_grad if ctx.has_branch else None, weight_grad, *(bias_grads or [None]), None, None, None


def num_warps(width: int, elements_per_thread: int) -> int:
    """Return the number of warps per program for rows with ``width`` elements."""
    return min(max(triton_launch.power_of_two(width) // (32 * elements_per_thread), 4), 16)
