"""Activation functions: GELU, ReLU, SiLU and gated ones, in forms that compile well on a CPU."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

# GELU. Layers compiled for a CPU use a form that is fast there.
#
# | [512, 8, 2048] in fp32, 2 cores | forward | backward |
# |---|---|---|
# | torch's kernel, "none" | 2.0 ms | 4.8 ms |
# | torch's kernel, "tanh" | 6.9 ms | 7.8 ms |
# | compiled, "tanh" | 7.3 ms | 13.9 ms |
# | compiled, "tanh" by the logistic function | 4.4 ms | 5.8 ms |
#
# Vectorized hyperbolic tangents are slow in torch's kernels and in compiled code; exponentials are fast.

LINEAR = 2 * math.sqrt(2 / math.pi)
CUBIC = 0.044715 * LINEAR


def gelu(x: torch.Tensor, approximate: str = "none") -> torch.Tensor:
    """Multiply ``x`` elementwise by the cumulative distribution function of the normal distribution at ``x``.

    Args:
        approximate: "none", or "tanh" for OpenAI's formula, Hugging Face's ``gelu_new``.

    Source: Hendrycks and Gimpel 2016, "Gaussian error linear units".
    """
    if torch.compiler.is_compiling() and x.device.type == "cpu":
        return _tanh_gelu(x) if approximate == "tanh" else _untraced_gelu(x)
    return F.gelu(x, approximate=approximate)


def _tanh_gelu(x: torch.Tensor) -> torch.Tensor:
    """Compute the "tanh" variant by the logistic function: (1 + tanh(u)) / 2 is the logistic function of 2 u.

    16-bit inputs are computed in fp32, as in torch's kernel.
    """
    wide = x if x.dtype == torch.float64 else x.float()
    return (wide * torch.sigmoid(wide * (LINEAR + CUBIC * wide * wide))).to(x.dtype)


def _untraced_gelu(x: torch.Tensor) -> torch.Tensor:
    """Compute the "none" variant with torch's kernel, in an operator that the compiler does not trace."""
    y: torch.Tensor = _gelu(x)
    return y


@torch.library.custom_op("megatron_tds::gelu", mutates_args=())
def _gelu(x: torch.Tensor) -> torch.Tensor:
    return F.gelu(x.contiguous())


@torch.library.custom_op("megatron_tds::gelu_backward", mutates_args=())
def _gelu_backward(grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return torch.ops.aten.gelu_backward(grad.contiguous(), x.contiguous())


@_gelu.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@_gelu_backward.register_fake
def _(grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _setup_gelu_context(ctx: Any, inputs: tuple[torch.Tensor], output: torch.Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _gelu_gradient(ctx: Any, grad: torch.Tensor) -> Any:
    return _gelu_backward(grad, *ctx.saved_tensors)


_gelu.register_autograd(_gelu_gradient, setup_context=_setup_gelu_context)


# ReLU. Layers compiled for a CPU use torch's kernel, in an operator that the compiler does not trace.
#
# Compiled code would save a boolean per element for backward and store the booleans one by one. In a trace of T5's step
# on 2 cores, its forward takes 40 ms for [512, 8, 2048] and its backward 10 ms; torch's kernels take 6 ms and 10 ms.


def relu(x: torch.Tensor) -> torch.Tensor:
    """Return ``max(x, 0)`` elementwise."""
    if torch.compiler.is_compiling() and x.device.type == "cpu":
        y: torch.Tensor = _relu(x)
        return y
    return F.relu(x)


def squared_relu(x: torch.Tensor) -> torch.Tensor:
    """Square the output of ``relu``.

    Source: So et al. 2021, "Primer: searching for efficient transformers for language modeling".
    """
    return relu(x).square()


@torch.library.custom_op("megatron_tds::relu", mutates_args=())
def _relu(x: torch.Tensor) -> torch.Tensor:
    return F.relu(x.contiguous())


@torch.library.custom_op("megatron_tds::relu_backward", mutates_args=())
def _relu_backward(grad: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.ops.aten.threshold_backward(grad.contiguous(), y, 0)


@_relu.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@_relu_backward.register_fake
def _(grad: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(y)


def _setup_relu_context(ctx: Any, inputs: tuple[torch.Tensor], output: torch.Tensor) -> None:
    ctx.save_for_backward(output)


def _relu_gradient(ctx: Any, grad: torch.Tensor) -> Any:
    return _relu_backward(grad, *ctx.saved_tensors)


_relu.register_autograd(_relu_gradient, setup_context=_setup_relu_context)


def quick_gelu(x: torch.Tensor) -> torch.Tensor:
    """Approximate ``gelu`` by ``x`` times the logistic function at ``1.702 x``.

    Source: Hendrycks and Gimpel 2016, "Gaussian error linear units", section 2.
    """
    return x * torch.sigmoid(1.702 * x)


# Activation functions by name.

Activation = Callable[[torch.Tensor], torch.Tensor]

ACTIVATIONS: dict[str, Activation] = {
    "gelu": gelu,
    "gelu-tanh": partial(gelu, approximate="tanh"),  # Hugging Face's gelu_new, OpenAI's GPT-2
    "relu": relu,
    "squared-relu": squared_relu,
    "silu": F.silu,
    "gated-gelu": partial(gelu, approximate="tanh"),  # activation of the gate, as in T5 v1.1 and mT5
    "gated-silu": F.silu,
    "gated-quick-gelu": quick_gelu,
}


def activation(name: str) -> Activation:
    """Return the activation ``name``; for a gated one, the gate's activation.

    Raises:
        ValueError: there is no activation of that name.
    """
    if name not in ACTIVATIONS:
        raise ValueError(f"--activation must be one of {', '.join(sorted(ACTIVATIONS))}, got {name}")
    return ACTIVATIONS[name]


def is_gated(name: str) -> bool:
    """Return True if the feed-forward layer multiplies the activation by a second product of the same input."""
    return name.startswith("gated-")
