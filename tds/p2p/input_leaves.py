"""Inputs of a stage's layers, and the leaves that collect their gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tds.p2p.structure import Tensors


def with_leaves(tensors: Sequence[torch.Tensor], is_local: bool = False) -> tuple[Tensors, list[torch.Tensor]]:
    """Return (layer inputs, leaves). After the backward, ``leaf.grad`` is the input gradient.

    The inputs share memory with ``tensors``. They are not leaves themselves, because a layer may change its input in
    place, which autograd forbids for a leaf that requires a gradient. A leaf has the shape of its input, but no memory
    (all strides are 0).

    Args:
        is_local: the tensors are another chunk's outputs on this stage. An in-place change to an input then increments
            the output's version counter, so that the other chunk's backward raises an error.
    """
    leaves = [t.new_empty_strided(t.shape, [0] * t.dim()).requires_grad_() for t in tensors]
    return (_FromLeaves.apply(tuple(tensors), is_local, *leaves) if leaves else ()), leaves


class _FromLeaves(torch.autograd.Function):
    """Connects leaves to tensors with the same shapes: the backward passes the tensors' gradients to the leaves."""

    @staticmethod
    def forward(ctx: Any, tensors: Tensors, is_local: bool, *leaves: torch.Tensor) -> Tensors:
        ctx.set_materialize_grads(False)
        # A new tensor per input, because autograd turns an input that is returned unchanged into a view.
        return tuple(t.detach() if is_local else t.data for t in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        return None, None, *gradients
