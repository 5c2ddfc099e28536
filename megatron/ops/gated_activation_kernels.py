"""Triton kernels of gated activations, launched by ``megatron.ops.gated_activation``.

Gate and value are the even and odd elements of one tensor. SiLU and the tanh form of GELU are both z times the logistic
function of u(z): u is z for SiLU, and ``LINEAR z + CUBIC z^3`` for GELU.
"""

from __future__ import annotations

import triton
import triton.language as tl

LINEAR: tl.constexpr = tl.constexpr(1.5957691216057308)  # as in megatron.ops.activations
CUBIC: tl.constexpr = tl.constexpr(0.07135481627260025)


@triton.jit
def gated_forward_kernel(pairs, out, num_outputs, IS_GELU: tl.constexpr, BLOCK: tl.constexpr):
    """Write ``activation(gate) * value``."""
    start = tl.program_id(0).to(tl.int64) * BLOCK
    idx = start + tl.arange(0, BLOCK)
    gate, value = _load_pairs(pairs, start, num_outputs, BLOCK)
    activated = gate * tl.sigmoid(_logit(gate, IS_GELU))
    tl.store(out + idx, (activated * value).to(out.dtype.element_ty), mask=idx < num_outputs)


@triton.jit
def gated_backward_kernel(grad, pairs, pairs_grad, num_outputs, IS_GELU: tl.constexpr, BLOCK: tl.constexpr):
    """Write the gradient for the interleaved gates and values."""
    start = tl.program_id(0).to(tl.int64) * BLOCK
    idx = start + tl.arange(0, BLOCK)
    gate, value = _load_pairs(pairs, start, num_outputs, BLOCK)
    out_grad = tl.load(grad + idx, mask=idx < num_outputs, other=0.0).to(tl.float32)
    logistic = tl.sigmoid(_logit(gate, IS_GELU))
    slope = LINEAR + 3.0 * CUBIC * gate * gate if IS_GELU else 1.0
    gate_grad = out_grad * value * logistic * (1.0 + gate * (1.0 - logistic) * slope)
    value_grad = out_grad * gate * logistic
    element = 2 * start + tl.arange(0, 2 * BLOCK)
    grads = tl.interleave(gate_grad, value_grad).to(pairs_grad.dtype.element_ty)
    tl.store(pairs_grad + element, grads, mask=element < 2 * tl.cast(num_outputs, tl.int64))


@triton.jit
def _load_pairs(pairs, start, num_outputs, BLOCK: tl.constexpr):
    """Load ``BLOCK`` gates and values in fp32; loads from consecutive elements are wide."""
    element = 2 * start + tl.arange(0, 2 * BLOCK)
    loaded = tl.load(pairs + element, mask=element < 2 * tl.cast(num_outputs, tl.int64), other=0.0).to(tl.float32)
    return tl.split(tl.reshape(loaded, (BLOCK, 2)))


@triton.jit
def _logit(gate, IS_GELU: tl.constexpr):
    return gate * (LINEAR + CUBIC * gate * gate) if IS_GELU else gate
