"""Run Hugging Face's classes entirely in fp64, by their own formulas."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

import torch


@contextmanager
def fp64_dtype_literals() -> Iterator[None]:
    """Let ``torch.float32`` and ``torch.float`` be the fp64 type; ``Tensor.float`` still converts to fp32."""
    with ExitStack() as stack:
        for name in ("float32", "float"):
            stack.enter_context(patch.object(torch, name, torch.float64))
        yield


@contextmanager
def fp64_instead_of_fp32() -> Iterator[None]:
    """Let code that names fp32 (norms, rotary angles, softmax of the classes) compute in fp64.

    In the block, ``torch.float32`` and ``torch.float`` are the fp64 type, ``Tensor.float`` is ``Tensor.double``, and
    fp64 is the default type, which quotients of integers have. The classes must be built in the block as well, because
    they compute rotary frequencies when they are built.
    """
    default_dtype = torch.get_default_dtype()
    with ExitStack() as stack:
        stack.enter_context(fp64_dtype_literals())
        stack.enter_context(patch.object(torch.Tensor, "float", torch.Tensor.double))
        stack.callback(torch.set_default_dtype, default_dtype)
        torch.set_default_dtype(torch.float64)
        yield
