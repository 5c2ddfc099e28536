"""Causal self-attention of compiled layers on a CPU: ``causal_kernel.cpp``, built by the compiler that they need too.

A head stays in its core's cache from the scores to the gradients. What ``causal_attention`` does by torch's operators
reads and writes each block of scores seven times on the way, and copies each head in and out for all cores to share.

| fp32, 2 cores, forward and backward | by blocks | this |
|---|---|---|
| [512, 8, 8, 64] | 55.6 ms | 35.3 ms |
| [1024, 4, 12, 64] | 157 ms | 107 ms |
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula

from megatron import log

SOURCE = Path(__file__).with_suffix(".cpp")
TILE = 16
"""Numbers of a head are a multiple of it: whole vectors on every kind of core."""


def takes(packed: torch.Tensor) -> bool:
    """Return whether this is for ``packed`` [s, b, a/t, 3, d]: in a compiled layer, on a CPU, in fp32."""
    is_fit = packed.device.type == "cpu" and packed.dtype == torch.float32 and packed.shape[-1] % TILE == 0
    return torch.compiler.is_compiling() and is_fit and is_built()


@torch.compiler.assume_constant_result
def is_built() -> bool:
    """Return whether the kernel is there; it is built when first asked for, and found in torch's cache after that."""
    return _library() is not None


@functools.cache
def _library() -> ctypes.CDLL | None:
    from torch._inductor.codecache import CppCodeCache  # 1 s: not before a layer is compiled

    try:
        found: Any = CppCodeCache.load(SOURCE.read_text())
        found.causal_numbers.restype = ctypes.c_int64
        return found
    except Exception as error:
        log.warn_once(
            f"attention of compiled layers goes by torch's operators, some 6 % of a step longer, for {SOURCE.name} "
            f"could not be built: {error}"
        )
        return None


@torch.library.custom_op("megatron_tds::causal_kernel", mutates_args=())
def forward(packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the context [s, b, a/t, d] and for each query the logarithm of its sum of exponentials [b a/t, s]."""
    s, b, a, _, d = packed.shape
    packed = packed.contiguous()
    context, sums = _like_outcome(packed)
    _call("causal_forward", packed, context, sums, _memory(packed, is_backward=False), sizes=(s, b * a, d))
    return context, sums


@torch.library.custom_op("megatron_tds::causal_kernel_backward", mutates_args=())
def backward(grad: torch.Tensor, packed: torch.Tensor, sums: torch.Tensor) -> torch.Tensor:
    """Return the gradient of ``packed``, like it in shape; that of the context is [s, b, a/t, d]."""
    s, b, a, _, d = packed.shape
    packed = packed.contiguous()
    found = torch.empty_like(packed)
    memory = _memory(packed, is_backward=True)
    _call("causal_backward", grad.contiguous(), packed, sums, found, memory, sizes=(s, b * a, d))
    return found


def _memory(packed: torch.Tensor, *, is_backward: bool) -> torch.Tensor:
    """Return what the threads work in."""
    s, d = packed.shape[0], packed.shape[-1]
    library = _library()
    assert library is not None
    each = library.causal_numbers(ctypes.c_int64(s), ctypes.c_int64(d), ctypes.c_bool(is_backward))
    return packed.new_empty(torch.get_num_threads() * each)


def _call(name: str, *tensors: torch.Tensor, sizes: tuple[int, ...]) -> None:
    places = (ctypes.c_void_p(each.data_ptr()) for each in tensors)
    getattr(_library(), name)(*places, *map(ctypes.c_int64, sizes))


def _like_outcome(packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    s, b, a, _, d = packed.shape
    return packed.new_empty(s, b, a, d), packed.new_empty(b * a, s)


@forward.register_fake
def _(packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return _like_outcome(packed)


@backward.register_fake
def _(grad: torch.Tensor, packed: torch.Tensor, sums: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(packed, memory_format=torch.contiguous_format)


def _remember(ctx: Any, inputs: tuple[torch.Tensor], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    ctx.save_for_backward(*inputs, output[1])


def _gradient(ctx: Any, grad: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    return backward(grad, *ctx.saved_tensors)


forward.register_autograd(_gradient, setup_context=_remember)


@register_flop_formula(torch.ops.megatron_tds.causal_kernel)
def _flops(packed: torch.Size, *_: Any, **__: Any) -> int:
    return 2 * products(packed)


@register_flop_formula(torch.ops.megatron_tds.causal_kernel_backward)
def _flops_of_backward(_: torch.Size, packed: torch.Size, *__: Any, **___: Any) -> int:
    return 5 * products(packed)


def products(shape: torch.Size) -> int:
    """Return the FLOPs of a product of every query with the keys it sees, itself among them."""
    s, b, a, _, d = shape
    return b * a * d * s * (s + 1)
