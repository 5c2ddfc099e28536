"""Gated activations ``act(gate) * value`` of a product whose columns are alternately gates and values.

The Triton kernels read pairs of a gate and a value from one tensor. Modules pass gate and value as two tensors, so that
their inputs and outputs do not depend on the device. With kernels, the two tensors are views of the product: ``split``
returns such views, and ``gated_activation`` recognises them. The backward of ``split`` recognises gradients that are
views of one tensor in the same way. Nothing is copied.
"""

from __future__ import annotations

from typing import Any

import torch

from megatron import triton_launch

KERNELS = "megatron.ops.gated_activation_kernels"
BLOCK = 1024
"""Number of outputs per program."""
NAMES = ("gated-silu", "gated-gelu")
"""Activations that the kernels compute."""


def split(interleaved: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Split gates and values: views of the even and the odd columns.

    Shapes:
        interleaved [..., 2 f]
        output      2 x [..., f]
    """
    if torch.compiler.is_compiling():
        gate, value = interleaved.unflatten(-1, (-1, 2)).unbind(-1)
    else:
        gate, value = _Split.apply(interleaved)
    return gate, value


def interleave(even: torch.Tensor, odd: torch.Tensor) -> torch.Tensor:
    """Interleave even and odd columns, without a copy if they are views of a contiguous tensor.

    Shapes:
        even, odd [..., f]
        output    [..., 2 f]
    """
    strides = [2]  # of the even columns of a contiguous tensor
    for size in reversed(even.shape[1:]):
        strides.insert(0, strides[0] * size)
    is_stored_so = even.stride() == odd.stride() == tuple(strides) and (
        even.untyped_storage()._cdata == odd.untyped_storage()._cdata
        and odd.storage_offset() == even.storage_offset() + 1
    )
    if is_stored_so:
        return even.as_strided((*even.shape[:-1], 2 * even.shape[-1]), (*strides[:-1], 1), even.storage_offset())
    return torch.stack((even, odd), dim=-1).flatten(-2)


def gated_activation(name: str, gate: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Compute ``activation(gate) * value`` with a kernel, in fp32 and rounded once.

    Only the interleaved gates and values are saved for backward.

    Shapes:
        gate, value, output [..., f]

    Args:
        name: "gated-silu" or "gated-gelu".
    """
    hidden: torch.Tensor = _GatedActivation.apply(name == "gated-gelu", gate, value)
    return hidden


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, interleaved: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return interleaved.unflatten(-1, (-1, 2)).unbind(-1)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        return interleave(*grads)


class _GatedActivation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, is_gelu: bool, gate: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        pairs = interleave(gate, value)
        ctx.is_gelu = is_gelu
        ctx.save_for_backward(pairs)
        out = torch.empty_like(gate, memory_format=torch.contiguous_format)
        if out.numel():
            triton_launch.launch(
                f"{KERNELS}:gated_forward_kernel", (-(-out.numel() // BLOCK),), pairs, out, out.numel(),
                writes=(out,), IS_GELU=is_gelu, BLOCK=BLOCK,
            )  # fmt: skip
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        (pairs,) = ctx.saved_tensors
        grad, pairs_grad = grads[0].contiguous(), torch.empty_like(pairs)
        if grad.numel():
            triton_launch.launch(
                f"{KERNELS}:gated_backward_kernel", (-(-grad.numel() // BLOCK),), grad, pairs, pairs_grad, grad.numel(),
                writes=(pairs_grad,), IS_GELU=ctx.is_gelu, BLOCK=BLOCK,
            )  # fmt: skip
        return None, *pairs_grad.unflatten(-1, (-1, 2)).unbind(-1)
