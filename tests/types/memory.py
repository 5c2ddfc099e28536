"""Types of tensors whose memory is not initialized, and of rows of partial sums that are selected by index."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any
from unittest.mock import patch

import spmd_types as spmd
import torch
from spmd_types import I, P, R, V

from tests.types.local_types import name_of, product_types, set_types, types_of


@contextmanager
def typed_memory() -> Iterator[None]:
    """Change two rules of ``spmd_types`` in the block.

    | operation | rule of the package | rule in the block |
    |---|---|---|
    | allocation of uninitialized numbers like x | the types of x; an error if x is P | V: the values differ |
    | ``index_select`` of a P | an error, because the indices are no P | P, if the indices are R or I |

    Uninitialized integers keep the package's rule: they are indices, and are overwritten by indices of the same types.
    """
    tensor_methods = {
        "new_empty": _varying(torch.Tensor.new_empty),
        "index_select": _selecting(torch.Tensor.index_select),
    }
    with (
        patch.multiple(torch, empty=_varying(torch.empty), empty_like=_varying(torch.empty_like)),
        patch.multiple(torch.Tensor, **tensor_methods),
    ):
        yield


def _varying(allocate: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @wraps(allocate)
    def allocate_varying(*args: Any, **kwargs: Any) -> torch.Tensor:
        if not spmd.is_type_checking():
            return allocate(*args, **kwargs)
        with spmd.no_typecheck():
            memory = allocate(*args, **kwargs)
        if not memory.is_floating_point():
            return allocate(*args, **kwargs)
        return set_types(memory, dict.fromkeys(spmd.current_mesh() or (), V))

    return allocate_varying


def _selecting(index_select: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @wraps(index_select)
    def select(x: torch.Tensor, dim: int, index: torch.Tensor) -> torch.Tensor:
        partial_axes = [axis for axis, local_type in types_of(x).items() if local_type is P]
        if not spmd.is_type_checking() or not partial_axes:
            return index_select(x, dim, index)
        for axis in partial_axes:
            if spmd.maybe_get_axis_local_type(index, axis) not in (R, I):
                raise spmd.SpmdTypeError(f"the indices of a partial sum must be R or I on axis {name_of(axis)}")
        types = product_types({**types_of(x), **dict.fromkeys(partial_axes, R)}, types_of(index))
        with spmd.no_typecheck():
            rows = index_select(x, dim, index)
        return set_types(rows, {**types, **dict.fromkeys(partial_axes, P)})

    return select
