"""Launch of Triton kernels by name, so that modules that use kernels can be imported without Triton.

A kernel is named "module:function". Its module, which imports Triton, is imported at the kernel's first launch. Callers
use ``triton_launch.is_available`` and ``triton_launch.launch`` as attributes of this module, so that tests can replace
the functions in one place.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Sequence
from typing import Any

import torch

from megatron.torch_compat import has_triton


def is_available(device: torch.device) -> bool:
    """Return True if Triton kernels support ``device``: Triton is installed, and the device is CUDA."""
    return device.type == "cuda" and has_triton()


def launch(
    kernel: str, grid: tuple[int, ...], *args: Any, writes: Sequence[torch.Tensor],
    updates: Sequence[torch.Tensor] = (), **constexprs: Any,
) -> None:  # fmt: skip
    """Launch ``kernel[grid](*args, **constexprs)``.

    Args:
        kernel: "module:function", such as "megatron.mpu.triton_kernels:dropout_kernel".
        grid: programs along each dimension; none may be 0.
        args: tensors and numbers in the order of the kernel's parameters.
        writes: the tensors in ``args`` that the kernel only writes.
        updates: the tensors in ``args`` that the kernel reads and writes.
        constexprs: the kernel's ``tl.constexpr`` parameters, and launch options such as ``num_warps``.

    ``writes`` and ``updates`` have no effect on the launch. The simulated device in tests/cuda uses them to count the
    bytes that a launch moves and to check the order of streams.
    """
    if hook is not None:
        hook(kernel, args, tuple(writes), tuple(updates))
        return
    find_kernel(kernel)[grid](*args, **constexprs)


Hook = Callable[[str, tuple[Any, ...], tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]], None]

hook: Hook | None = None
"""Called in place of a launch with its ``kernel``, ``args``, ``writes`` and ``updates``; None except in tests."""


@functools.cache
def find_kernel(kernel: str) -> Any:
    """Import the module of ``kernel``, "module:function", and return the function."""
    module, _, function = kernel.partition(":")
    return getattr(importlib.import_module(module), function)


def power_of_two(n: int) -> int:
    """Round ``n`` up to a power of two: the block size for ``n`` elements."""
    return 1 << (n - 1).bit_length()
