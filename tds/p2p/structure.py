"""Structures that cross a stage boundary: one tensor, or a tuple, list or dict of tensors.

The receiving stage's layer gets the tensors in the same container and order as the sending layer returned them, and
may change them in place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

CONTAINERS: tuple[type, ...] = (torch.Tensor, tuple, list, dict)
"""Container types; headers contain the index into this tuple."""


@dataclass(frozen=True)
class Structure:
    """A stage output's container without its tensors; ``keys`` are a dict's keys in order."""

    container: type = torch.Tensor
    keys: tuple[str, ...] = ()

    def rebuild(self, tensors: Sequence[torch.Tensor]) -> Any:
        """Put ``tensors`` into this container."""
        if self.container is torch.Tensor:
            return tensors[0]
        if self.container is dict:
            return dict(zip(self.keys, tensors, strict=True))
        return self.container(tensors)

    def __str__(self) -> str:
        return (
            f"dict of {', '.join(map(repr, self.keys))}" if self.container is dict else self.container.__name__.lower()
        )


SINGLE = Structure()
TUPLE = Structure(tuple)
LIST = Structure(list)


def flatten(output: Any) -> tuple[tuple[torch.Tensor, ...], Structure]:
    """Split a stage's output into (tensors, structure).

    Raises:
        TypeError: the output is neither a tensor nor a plain tuple, list or dict of tensors, or a dict key is not a
            string.
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
    for key_or_idx, tensor in zip(structure.keys or range(len(tensors)), tensors, strict=True):
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(
                f"must return tensors, got {type(tensor).__name__} at [{key_or_idx!r}] of the {type(output).__name__}. "
                "Remove it, or convert it to a tensor."
            )
    return tensors, structure


Tensors = tuple[torch.Tensor, ...]
