"""Operators that are one kernel on CUDA, but composed of other operators in a CPU build of torch."""

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
    _libraries.append(library)


def _raise_error(*args: Any, **kwargs: Any) -> NoReturn:
    raise RuntimeError("an operator of the simulated device was called outside of its mode")
