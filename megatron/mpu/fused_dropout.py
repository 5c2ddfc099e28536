"""Dropout by one kernel on CUDA (Triton), without a mask in memory; and as one operator of a compiled layer."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megatron.device import default_generator

MOST_GROUPS = 256
"""Counters, of 4 columns each, that a program of the kernel works on."""
WORDS = 2**32


@functools.cache
def is_there() -> bool:
    """Return whether Triton is installed."""
    return importlib.util.find_spec("triton") is not None


@dataclass(frozen=True)
class Mask:
    """Which elements are dropped: those whose word of Philox-4x32-10 is below ``probability`` of all words.

    Counters are those of ``PhiloxDropout``; ``first`` has the row, sample, plane and column with which a tensor begins.
    Tensors of hidden states [s, b, h], or with ``is_attention`` [b, a, s, s_k].
    """

    key: int
    probability: float
    first: tuple[int, int, int, int] = (0, 0, 0, 0)
    is_attention: bool = False


def drop(x: torch.Tensor, residual: torch.Tensor | None, mask: Mask) -> torch.Tensor:
    """Return ``residual + dropout(x)``, or without a residual the latter; backward makes the mask once more.

    Shapes:
        x, residual, output as ``Mask`` has them
    """
    dropped: torch.Tensor = _Dropped.apply(x, residual, mask)
    return dropped


class _Dropped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, residual: torch.Tensor | None, mask: Mask) -> torch.Tensor:
        ctx.mask, ctx.has_residual = mask, residual is not None
        return run_kernel(x, residual, mask)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return run_kernel(grads[0], None, ctx.mask), grads[0] if ctx.has_residual else None, None


def run_kernel(x: torch.Tensor, residual: torch.Tensor | None, mask: Mask) -> torch.Tensor:
    """Return what ``drop`` does, without a gradient."""
    from megatron.mpu.triton_kernels import dropped  # not ahead of need: without Triton there is no such file

    x = x.contiguous()
    residual = None if residual is None else residual.contiguous()
    out = torch.empty_like(x)
    if not x.numel():
        return out
    *outer, width = x.shape
    inner, middle = (outer[-1], outer[-2]) if len(outer) > 1 else (1, 1)
    groups = -(-(width + mask.first[3] % 4) // 4)
    at_once = min(MOST_GROUPS, 1 << (groups - 1).bit_length())
    key = mask.key - 2**64 if mask.key >= 2**63 else mask.key  # as a signed number, of one type for all keys
    dropped[(x.numel() // width, -(-groups // at_once))](
        x, x if residual is None else residual, out, key, round(mask.probability * WORDS),
        1.0 / (1.0 - mask.probability), width, inner, middle, *mask.first,
        HAS_RESIDUAL=residual is not None, IS_ATTENTION=mask.is_attention, GROUPS=at_once,
    )  # fmt: skip
    return out


# The same as an operator, which a compiled layer calls in the midst of its graph. A mask is one of seed and place: what
# changes from one forward to the next, step and micro-batch, comes in a tensor, and so does the number of the layer; as
# numbers in Python they would be compiled in.


@torch.library.custom_op("megatron_tds::keyed_dropout", mutates_args=())
def keyed_dropout(
    x: torch.Tensor,
    position: torch.Tensor,
    layer: torch.Tensor,
    ranks: Sequence[int],
    site: str,
    probability: float,
    by_kernel: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``x`` with elements dropped, and what backward needs: the key, or the factor of each element.

    Args:
        position: step and micro-batch, on the CPU.
        layer: its number, likewise.
        ranks: the seed, and the ranks of ``DropoutStreams.key``.
        by_kernel: ``DropoutStreams.by_kernel``; else masks are those of torch's generator.
    """
    from megatron.mpu.random_key import hashed  # not at the top: that file imports this one

    key = hashed((ranks[0], *position.tolist(), *ranks[1:], int(layer), site), 7)
    x = x.contiguous()
    if by_kernel:
        return run_kernel(x, None, Mask(key, probability)), position.new_tensor([key])
    generator = default_generator(x.device)
    state = generator.get_state()
    generator.manual_seed(key)
    try:
        factors = torch.empty_like(x).bernoulli_(1.0 - probability).div_(1.0 - probability)  # as torch on a CPU
    finally:
        generator.set_state(state)
    return x * factors, factors


@keyed_dropout.register_fake
def _(
    x: torch.Tensor,
    position: torch.Tensor,
    layer: torch.Tensor,
    ranks: Sequence[int],
    site: str,
    probability: float,
    by_kernel: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    made = torch.empty_like(x, memory_format=torch.contiguous_format)
    return made, position.new_empty(1) if by_kernel else torch.empty_like(made)


@torch.library.custom_op("megatron_tds::keyed_dropout_gradient", mutates_args=())
def keyed_dropout_gradient(grad: torch.Tensor, key: torch.Tensor, probability: float) -> torch.Tensor:
    """Return the gradient of ``x`` by the mask of ``key``."""
    return run_kernel(grad, None, Mask(int(key), probability))


@keyed_dropout_gradient.register_fake
def _(grad: torch.Tensor, key: torch.Tensor, probability: float) -> torch.Tensor:
    return torch.empty_like(grad, memory_format=torch.contiguous_format)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    *_, ctx.probability, ctx.by_kernel = inputs
    ctx.save_for_backward(output[1])


def _gradient(ctx: Any, grad: torch.Tensor, _: torch.Tensor) -> Any:
    (kept,) = ctx.saved_tensors
    of_x = keyed_dropout_gradient(grad, kept, ctx.probability) if ctx.by_kernel else grad * kept
    return of_x, None, None, None, None, None, None


keyed_dropout.register_autograd(_gradient, setup_context=_keep)
