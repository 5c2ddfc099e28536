"""The tensors that a stage's layers get, received or its own, and the leaves in which their gradients will lie."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tds.p2p.structure import Tensors


def with_leaves(tensors: Sequence[torch.Tensor], is_own: bool = False) -> tuple[Tensors, list[torch.Tensor]]:
    """Return (inputs of the layers, leaves): after the backward, ``leaf.grad`` is the gradient of the input.

    The inputs share the memory of ``tensors``. They are not leaves themselves, because a layer may change its input in
    place, which autograd forbids for a leaf that requires a gradient. A leaf has the shape of its input, but no memory
    (all strides are 0).

    Args:
        is_own: the tensors are outputs of another chunk of this stage. Then an in-place change of an input raises the
            version counter of the output, so that the backward of that chunk reports it.
    """
    leaves = [t.new_empty_strided(t.shape, [0] * t.dim()).requires_grad_() for t in tensors]
    return (_FromLeaves.apply(tuple(tensors), is_own, *leaves) if leaves else ()), leaves


class _FromLeaves(torch.autograd.Function):
    """Maps leaves to tensors of the same shapes; in the backward the gradients of the tensors go to the leaves."""

    @staticmethod
    def forward(ctx: Any, tensors: Tensors, is_own: bool, *leaves: torch.Tensor) -> Tensors:
        ctx.set_materialize_grads(False)
        return tuple(t.detach() if is_own else t.data for t in tensors)  # of one that is returned itself: a view

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        return None, None, *gradients
