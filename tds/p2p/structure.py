"""Structure of the tensors that cross a stage boundary: one tensor, a tuple, list or dict.

The receiving stage's layer gets what the sending one returned, in the same form and order, and may work on it in
place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

CONTAINERS: tuple[type, ...] = (torch.Tensor, tuple, list, dict)
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
    return ((output,), SINGLE) if isinstance(output, torch.Tensor) else _flatten_container(output)


def _flatten_container(output: Any) -> tuple[tuple[torch.Tensor, ...], Structure]:
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


Tensors = tuple[torch.Tensor, ...]
