"""Operators that are one kernel on CUDA, but are composed of other operators or incomplete in a CPU build of torch."""

from __future__ import annotations

from typing import Any, NoReturn

import torch

FUSED_OPERATORS = ("_fused_rms_norm", "_fused_rms_norm_backward", "silu_backward")
_libraries: list[torch.library.Library] = []


def install() -> None:
    """Register a CUDA kernel for each operator, so that the dispatcher does not decompose it.

    The kernels are never called, because a ``TorchDispatchMode`` handles all operators of the simulated device.
    """
    library = torch.library.Library("aten", "IMPL")
    for name in FUSED_OPERATORS:
        library.impl(name, _raise_error, "CUDA")
    library.impl("_scaled_mm.out", _scaled_mm_out, "Meta")
    _libraries.append(library)


def _scaled_mm_out(*args: Any, out: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    """Check arguments as the variant without ``out`` does; torch has no meta kernel for this variant."""
    expected = torch.ops.aten._scaled_mm.default(*args, **kwargs)
    assert (expected.shape, expected.dtype) == (out.shape, out.dtype)
    return out


def _raise_error(*args: Any, **kwargs: Any) -> NoReturn:
    raise RuntimeError("an operator of the simulated device was called outside of its mode")
