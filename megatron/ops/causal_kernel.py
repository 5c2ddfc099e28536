"""Causal self-attention in fp32 on a CPU: ``causal_kernel.cpp``, built when a run first asks for it, where g++ is.

A head stays in its core's cache from the scores to the gradients. ``causal_attention``, by torch's operators, goes over
each block of scores with one kernel after another, and copies heads in and out for all cores to share.

| fp32, 2 cores, forward and backward | by blocks | this |
|---|---|---|
| [512, 8, 8, 64] | 55 ms | 36 ms |
| [1024, 4, 12, 64] | 160 ms | 107 ms |
| [2048, 1, 16, 128] | 299 ms | 248 ms |
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula

from megatron import log
from megatron.torch_compat import load_cpp

SOURCE = Path(__file__).with_suffix(".cpp")
VECTORS = {"AVX512": "-march=skylake-avx512", "AVX2": "-march=haswell"}
"""Processors, by torch's word for them, that this is for -> what each of them has, in place of torch's ``native``.

torch's cache knows a library by its text and flags, and may lie where machines of several kinds see it.
"""


def takes(packed: torch.Tensor) -> bool:
    """Return whether this is for ``packed`` [s, b, a/t, 3, d], on a CPU: in fp32, where it could be built."""
    return packed.dtype == torch.float32 and is_built()


@torch.compiler.assume_constant_result
def is_built() -> bool:
    """Return whether the kernel is there; it is built in 3 s when first asked for, and in torch's cache after that."""
    return _library() is not None


@functools.cache
def _library() -> ctypes.CDLL | None:
    capability = torch.backends.cpu.get_cpu_capability()
    if capability not in VECTORS:
        return None
    flags = f"-DCPU_CAPABILITY={capability}", f"-DCPU_CAPABILITY_{capability}", VECTORS[capability], "-mtune=native"
    try:
        found: Any = load_cpp(SOURCE.read_text(), flags)
        found.causal_vectors.restype = found.causal_numbers.restype = ctypes.c_int64
        found.causal_forward.restype = found.causal_backward.restype = ctypes.c_char_p
        return found
    except Exception as error:
        has_none = type(error).__name__ == "InvalidCxxCompiler"
        (log.info if has_none else log.warn_once)(
            f"attention goes by torch's operators, some 5 % of a step longer, for {SOURCE.name} could not be built; it "
            f"needs a C++ compiler (g++, or what CXX names): {str(error)[:3000]}"
        )
        return None


@torch.library.custom_op("megatron_tds::causal_kernel", mutates_args=())
def forward(packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the context [s, b, a/t, d]; and for the backward alone, without a gradient, two numbers of each query.

    They are its largest score, which no factor has yet, and what its exponentials are multiplied by: [2, b a/t, s].
    """
    packed = packed.contiguous()
    context, queries = _like_outcome(packed)
    _call("causal_forward", packed, context, queries, is_backward=False, packed=packed)
    return context, queries


@torch.library.custom_op("megatron_tds::causal_kernel_backward", mutates_args=())
def backward(grad: torch.Tensor, packed: torch.Tensor, queries: torch.Tensor) -> torch.Tensor:
    """Return the gradient of ``packed``, like it in shape; that of the context is [s, b, a/t, d]."""
    packed = packed.contiguous()
    found = torch.empty_like(packed)
    _call("causal_backward", grad.contiguous(), packed, queries, found, is_backward=True, packed=packed)
    return found


def _call(name: str, *tensors: torch.Tensor, is_backward: bool, packed: torch.Tensor) -> None:
    """Call ``name`` of the library with ``tensors``, rooms for threads to work in, and the sizes of ``packed``.

    Raises:
        RuntimeError: what it ran into.
    """
    s, b, a, _, d = packed.shape
    library, rooms = _library(), max(1, min(torch.get_num_threads(), b * a))
    assert library is not None
    each = library.causal_numbers(ctypes.c_int64(s), ctypes.c_int64(d), ctypes.c_bool(is_backward))
    memory = packed.new_empty(rooms * each)
    places = (ctypes.c_void_p(each.data_ptr()) for each in (*tensors, memory))
    error = getattr(library, name)(*places, *map(ctypes.c_int64, (rooms, s, b * a, d)))
    if error is not None:
        raise RuntimeError(f"{name} of {SOURCE.name} on {tuple(packed.shape)}: {error.decode()}")


def _like_outcome(packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    s, b, a, _, d = packed.shape
    return packed.new_empty(s, b, a, d), packed.new_empty(2, b * a, s)


@forward.register_fake
def _(packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return _like_outcome(packed)


@backward.register_fake
def _(grad: torch.Tensor, packed: torch.Tensor, queries: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(packed, memory_format=torch.contiguous_format)


def _setup_kernel_context(ctx: Any, inputs: tuple[torch.Tensor], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    ctx.save_for_backward(*inputs, output[1])


def _kernel_gradient(ctx: Any, grad: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    return backward(grad, *ctx.saved_tensors)


forward.register_autograd(_kernel_gradient, setup_context=_setup_kernel_context)


@register_flop_formula(torch.ops.megatron_tds.causal_kernel)
def _kernel_flops(packed: torch.Size, *_: Any, **__: Any) -> int:
    return 2 * products(packed)


@register_flop_formula(torch.ops.megatron_tds.causal_kernel_backward)
def _kernel_backward_flops(_: torch.Size, packed: torch.Size, *__: Any, **___: Any) -> int:
    return 5 * products(packed)


def products(shape: torch.Size) -> int:
    """Return the FLOPs of a product of every query with the keys it sees, itself among them."""
    s, b, a, _, d = shape
    return b * a * d * s * (s + 1)
