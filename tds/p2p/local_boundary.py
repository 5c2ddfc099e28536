"""Tensors that a stage passes to itself, protected against in-place changes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tds.p2p.structure import Tensors


def entered(tensors: Sequence[torch.Tensor], is_own: bool = False) -> tuple[Tensors, list[torch.Tensor]]:
    """Return (``tensors`` as layers are given them, the leaves in which their gradients will lie).

    What is given shares the memory of ``tensors``: nothing is copied. It is no leaf that requires a gradient and no
    view of one, since autograd lets no layer work on these in place. The leaves have shapes and no memory.
    """
    leaves = [t.new_empty_strided(t.shape, [0] * t.dim()).requires_grad_() for t in tensors]
    return (_Enter.apply(tuple(tensors), is_own, *leaves) if leaves else ()), leaves


class _Enter(torch.autograd.Function):
    """From leaves to the tensors that they stand for, whose gradients are theirs."""

    @staticmethod
    def forward(ctx: Any, tensors: Tensors, is_own: bool, *leaves: torch.Tensor) -> Tensors:
        ctx.set_materialize_grads(False)
        return tuple(t.detach() if is_own else t.data for t in tensors)  # of one that is returned itself: a view

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        return None, None, *gradients
