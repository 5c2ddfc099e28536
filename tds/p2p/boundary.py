"""Boundary: the user's declaration of the tensors that cross a stage boundary.

a header.

On the module, one entry for each tensor that crosses:

    module._input_grad = [True, False]               # keeps a gradient?
    module._input_type = ["float", "bool"]           # float, int, bool, or a torch.dtype
    module._input_pipe_partitioned = [True, False]   # cut over the tensor group while it travels?

or as records, for all boundaries or, by the piece of the model whose output it is, for each:

    module.boundary = [Boundary("hidden"), Boundary("mask", "bool")]
    module.boundary = {0: [Boundary("hidden")], 1: [Boundary("hidden"), Boundary("memory", torch.float32)]}

The same on every rank. Without a declaration whatever comes travels, and a float needs a gradient where the sender's
graph has one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

KINDS = ("float", "int", "bool")
LISTS = ("_input_grad", "_input_type", "_input_pipe_partitioned")


class BoundaryError(ValueError):
    """What crosses a stage does not match what was declared, or what was sent before."""


def kind_of(dtype: torch.dtype) -> str:
    """Return "float", "int" or "bool"."""
    if dtype is torch.bool:
        return "bool"
    return "float" if dtype.is_floating_point or dtype.is_complex else "int"


def dtype_name(dtype: torch.dtype | str | None) -> str:
    """Return ``dtype`` as it is written: "float32", "float", "any"."""
    return "any" if dtype is None else str(dtype).removeprefix("torch.")


@dataclass(frozen=True)
class Boundary:
    """One declared tensor.

    ``dtype``: a torch.dtype, a kind (float, int, bool), or None for whatever comes. ``needs_grad``: by default what is
    no int and no bool has a gradient. ``partitioned``: cut over the tensor group while it travels.
    """

    name: str = ""
    dtype: torch.dtype | str | None = "float"
    needs_grad: bool | None = None
    partitioned: bool = False

    def __post_init__(self) -> None:
        if self.needs_grad is None:
            object.__setattr__(self, "needs_grad", self.kind in ("float", None))

    @property
    def kind(self) -> str | None:
        """Return the kind of ``dtype``."""
        return kind_of(self.dtype) if isinstance(self.dtype, torch.dtype) else self.dtype

    def fits(self, dtype: torch.dtype) -> bool:
        """True if a tensor of ``dtype`` is as declared."""
        return self.dtype in (None, dtype, kind_of(dtype))


Records = tuple[Boundary, ...]
Declared = Records | dict[int, Records] | None


def declaration(module: Any) -> str:
    """Return a text that changes with what ``module`` declares."""
    return repr([getattr(module, name, None) for name in ("boundary", *LISTS)])


def declared_boundary(module: Any) -> Declared:
    """Return the records that ``module`` declares, by records or by the three lists; None if it declares nothing.

    Raises:
        BoundaryError: lists of unequal length, unknown types, a gradient for what is no float, lists beside records.
    """
    records = getattr(module, "boundary", None)
    lists = {name: list(getattr(module, name)) for name in LISTS if getattr(module, name, None) is not None}
    if records is not None:
        if lists:
            raise BoundaryError(f"what crosses a stage must be declared once, got boundary and {', '.join(lists)}")
        if isinstance(records, Mapping):
            return {int(piece): _checked(tuple(each)) for piece, each in records.items()}
        return _checked(tuple(records))
    if not lists:
        return None
    lengths = {name: len(values) for name, values in lists.items()}
    if len(set(lengths.values())) != 1:
        raise BoundaryError(f"the lists that say what crosses a stage must be of one length, got {lengths}")
    size = next(iter(lengths.values()))
    types = lists.get("_input_type", [None] * size)
    grads = lists.get("_input_grad", [None] * size)
    cuts = lists.get("_input_pipe_partitioned", [False] * size)
    return _checked(tuple(Boundary("", *each) for each in zip(types, grads, cuts, strict=True)))


def records_of(declared: Declared, piece: int) -> Records | None:
    """Return what ``piece`` of the model must pass on; None if that is not declared."""
    return declared.get(piece) if isinstance(declared, dict) else declared


def set_list(module: Any, name: str, values: Sequence[Any] | None) -> None:
    """Set one of the three lists on ``module``, from the next call on; None takes it away. The same on every rank.

    That the lists agree is checked at the next call, so that they can be set one after another.

    Raises:
        BoundaryError: entries that such a list cannot hold.
    """
    if name not in LISTS:
        raise BoundaryError(f"the lists that say what crosses a stage are {', '.join(LISTS)}, got {name!r}")
    if values is not None:
        if isinstance(values, (str, torch.Tensor)) or not isinstance(values, Sequence):
            raise BoundaryError(f"{name} must be a list with one entry for each tensor, got {values!r}")
        for index, value in enumerate(values):
            _check_type(index, value) if name == "_input_type" else _check_flag(name, index, value)
        values = list(values)
    setattr(module, name, values)


def _checked(records: Records) -> Records:
    for index, record in enumerate(records):
        if not isinstance(record, Boundary):
            raise BoundaryError(f"boundary[{index}] must be a Boundary, got {record!r}")
        _check_type(index, record.dtype)
        _check_flag("_input_grad", index, record.needs_grad)
        _check_flag("_input_pipe_partitioned", index, record.partitioned)
        if record.needs_grad and record.kind in ("int", "bool"):
            raise BoundaryError(
                f"only floats have gradients, got _input_grad[{index}]=True with _input_type[{index}]="
                f"{dtype_name(record.dtype)!r}. Set _input_grad to False there, or the type to 'float'."
            )
    return records


def _check_type(index: int, value: Any) -> None:
    if value is not None and not isinstance(value, torch.dtype) and value not in KINDS:
        raise BoundaryError(f"_input_type[{index}] must be one of {KINDS}, a torch.dtype or None, got {value!r}")


def _check_flag(name: str, index: int, value: Any) -> None:
    if value not in (True, False):
        raise BoundaryError(f"{name}[{index}] must be True or False, got {value!r}")
