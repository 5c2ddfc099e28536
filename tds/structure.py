"""How the tensors that cross a stage hang together: one tensor, or a tuple, list or dict of them.

The receiving stage's layer gets what the sending one returned, in the same form and order, and may work on it in place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

FORMS: tuple[type, ...] = (torch.Tensor, tuple, list, dict)
"""Their places in this list travel in headers."""


@dataclass(frozen=True)
class Structure:
    """The form of a stage's output without its tensors; ``keys`` are a dict's, in its order."""

    form: type = torch.Tensor
    keys: tuple[str, ...] = ()

    def rebuild(self, tensors: Sequence[torch.Tensor]) -> Any:
        """Return ``tensors`` in this form."""
        if self.form is torch.Tensor:
            return tensors[0]
        if self.form is dict:
            return dict(zip(self.keys, tensors, strict=True))
        return self.form(tensors)

    def __str__(self) -> str:
        return f"dict of {', '.join(map(repr, self.keys))}" if self.form is dict else self.form.__name__.lower()


SINGLE = Structure()
TUPLE = Structure(tuple)
LIST = Structure(list)


def flatten(output: Any) -> tuple[tuple[torch.Tensor, ...], Structure]:
    """Return (the tensors, their structure).

    Raises:
        TypeError: no tensor, nor a plain tuple, list or dict of tensors; dict keys that are no strings.
    """
    if isinstance(output, torch.Tensor):
        return (output,), SINGLE
    if type(output) is dict:
        tensors, structure = tuple(output.values()), Structure(dict, tuple(output))
    elif type(output) in (tuple, list):
        tensors, structure = tuple(output), TUPLE if type(output) is tuple else LIST
    else:
        raise TypeError(f"must return a tensor or a plain tuple, list or dict of tensors, got {type(output).__name__}")
    for key in structure.keys:
        if type(key) is not str:
            raise TypeError(f"must return a dict whose keys are strings, got the key {key!r}")
    for place, tensor in zip(structure.keys or range(len(tensors)), tensors, strict=True):
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(
                f"must return tensors, got {type(tensor).__name__} at [{place!r}] of the {type(output).__name__}. "
                "Leave it out, or make a tensor of it."
            )
    return tensors, structure


def entered(tensors: Sequence[torch.Tensor]) -> tuple[tuple[torch.Tensor, ...], list[torch.Tensor]]:
    """Return (``tensors`` as layers are given them, the leaves in which their gradients will lie).

    What is given shares the memory of ``tensors``: nothing is copied. It is no leaf that requires a gradient and no
    view of one, since autograd lets no layer work on these in place. The leaves have shapes and no memory.
    """
    leaves = [t.new_empty_strided(t.shape, [0] * t.dim()).requires_grad_() for t in tensors]
    return (_Enter.apply(tuple(tensors), *leaves) if leaves else ()), leaves


class _Enter(torch.autograd.Function):
    """From leaves to the tensors that they stand for, whose gradients are theirs."""

    @staticmethod
    def forward(ctx: Any, tensors: tuple[torch.Tensor, ...], *leaves: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        return tuple(tensor.data for tensor in tensors)  # of a tensor that is returned itself autograd makes a view

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        return None, *gradients
