"""Dropout by a Triton kernel on CUDA, which stores no mask, and by a custom operator for compiled layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megatron import triton_launch
from megatron.device import default_generator

MAX_GROUPS = 256
"""Maximum number of counters, of 4 columns each, per program of the kernel."""
NUM_WORDS = 2**32


@dataclass(frozen=True)
class Mask:
    """A dropout mask: an element is dropped if its Philox word is below ``probability * 2**32``.

    The words are computed by Philox-4x32-10 from the counters of ``PhiloxDropout``. ``origin`` is the row, sample,
    plane (head, or 0 for hidden states) and column of the tensor's first element. Tensors are hidden states [s, b, h],
    or with ``is_attention`` probabilities [b, a, s, s_k].
    """

    key: int
    probability: float
    origin: tuple[int, int, int, int] = (0, 0, 0, 0)
    is_attention: bool = False


def drop(x: torch.Tensor, residual: torch.Tensor | None, mask: Mask) -> torch.Tensor:
    """Return ``residual + dropout(x)``, or ``dropout(x)`` without a residual; backward recomputes the mask.

    Shapes:
        x, residual, output: see ``Mask``
    """
    output: torch.Tensor = _FusedDropout.apply(x, residual, mask)
    return output


class _FusedDropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, residual: torch.Tensor | None, mask: Mask) -> torch.Tensor:
        ctx.mask, ctx.has_residual = mask, residual is not None
        return run_kernel(x, residual, mask)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return run_kernel(grads[0], None, ctx.mask), grads[0] if ctx.has_residual else None, None


def run_kernel(x: torch.Tensor, residual: torch.Tensor | None, mask: Mask) -> torch.Tensor:
    """Apply ``drop`` without autograd."""
    x = x.contiguous()
    residual = None if residual is None else residual.contiguous()
    out = torch.empty_like(x)
    if not x.numel():
        return out
    *outer, width = x.shape
    inner, middle = (outer[-1], outer[-2]) if len(outer) > 1 else (1, 1)
    num_groups = -(-(width + mask.origin[3] % 4) // 4)
    groups_per_program = min(MAX_GROUPS, 1 << (num_groups - 1).bit_length())
    key = mask.key - 2**64 if mask.key >= 2**63 else mask.key  # as a signed integer, so that all keys have one type
    triton_launch.launch(
        "megatron.mpu.triton_kernels:dropout_kernel", (x.numel() // width, -(-num_groups // groups_per_program)),
        x, x if residual is None else residual, out, key, round(mask.probability * NUM_WORDS),
        1.0 / (1.0 - mask.probability), width, inner, middle, *mask.origin,
        writes=(out,), HAS_RESIDUAL=residual is not None, IS_ATTENTION=mask.is_attention, GROUPS=groups_per_program,
    )  # fmt: skip
    return out


# The same dropout as a custom operator, which compiled layers call within their graphs. Step, micro-batch and layer are
# passed as tensors, because the compiler would treat Python integers as constants.


@torch.library.custom_op("megatron_tds::keyed_dropout", mutates_args=())
def keyed_dropout(
    x: torch.Tensor,
    position: torch.Tensor,
    layer: torch.Tensor,
    seed_and_ranks: Sequence[int],
    site: str,
    probability: float,
    use_kernel: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Apply dropout to ``x``; also return the tensor that backward needs: the key, or elementwise factors.

    Args:
        position: step and micro-batch, on the CPU.
        layer: layer index, on the CPU.
        seed_and_ranks: the seed, followed by the ranks that ``DropoutStreams.key`` hashes.
        use_kernel: ``DropoutStreams.uses_kernel``; if False, masks are drawn from torch's generator.
    """
    from megatron.mpu.random_key import hash_key

    key = hash_key((seed_and_ranks[0], *position.tolist(), *seed_and_ranks[1:], int(layer), site), 7)
    x = x.contiguous()
    if use_kernel:
        return run_kernel(x, None, Mask(key, probability)), position.new_tensor([key])
    generator = default_generator(x.device)
    state = generator.get_state()
    generator.manual_seed(key)
    try:
        factors = torch.empty_like(x).bernoulli_(1.0 - probability).div_(1.0 - probability)  # as torch does on a CPU
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
    use_kernel: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    return out, position.new_empty(1) if use_kernel else torch.empty_like(out)


@torch.library.custom_op("megatron_tds::keyed_dropout_gradient", mutates_args=())
def keyed_dropout_gradient(grad: torch.Tensor, key: torch.Tensor, probability: float) -> torch.Tensor:
    """Compute the input gradient: ``grad`` with the mask for ``key`` applied."""
    return run_kernel(grad, None, Mask(int(key), probability))


@keyed_dropout_gradient.register_fake
def _(grad: torch.Tensor, key: torch.Tensor, probability: float) -> torch.Tensor:
    return torch.empty_like(grad, memory_format=torch.contiguous_format)


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    *_, ctx.probability, ctx.uses_kernel = inputs
    ctx.save_for_backward(output[1])


def _keyed_dropout_backward(ctx: Any, grad: torch.Tensor, _: torch.Tensor) -> Any:
    (saved,) = ctx.saved_tensors
    x_grad = keyed_dropout_gradient(grad, saved, ctx.probability) if ctx.uses_kernel else grad * saved
    return x_grad, None, None, None, None, None, None


keyed_dropout.register_autograd(_keyed_dropout_backward, setup_context=_save_for_backward)
