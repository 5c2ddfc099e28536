"""Boundary: a user's declaration for tensors that cross a stage boundary.

The module has either three lists with one entry per tensor:

    module._input_grad = [True, False]               # is a gradient sent back?
    module._input_type = ["float", "bool"]           # float, int, bool, or a torch.dtype
    module._input_pipe_partitioned = [True, False]   # sharded over the tensor group in transit?

or a list of records. It applies to all boundaries, or is given per boundary in a dict whose keys are the sending
virtual stages:

    module.boundary = [Boundary("hidden"), Boundary("mask", "bool")]
    module.boundary = {0: [Boundary("hidden")], 1: [Boundary("hidden"), Boundary("memory", torch.float32)]}

The declaration must be equal on every rank. Without a declaration, any tensors may be sent, and a gradient is sent back
for each float tensor that requires one on the sender.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

DTYPE_CLASSES = ("float", "int", "bool")
LIST_NAMES = ("_input_grad", "_input_type", "_input_pipe_partitioned")


class BoundaryError(ValueError):
    """Raised if the tensors at a boundary do not match the declaration or earlier micro-batches."""


def dtype_class_of(dtype: torch.dtype) -> str:
    """Classify ``dtype`` as "float" (complex included), "int" or "bool"."""
    if dtype is torch.bool:
        return "bool"
    return "float" if dtype.is_floating_point or dtype.is_complex else "int"


def dtype_name(dtype: torch.dtype | str | None) -> str:
    """Format ``dtype`` for messages: "float32", "float", or "any" for None."""
    return "any" if dtype is None else str(dtype).removeprefix("torch.")


@dataclass(frozen=True)
class Boundary:
    """One tensor's declaration.

    Attributes:
        dtype: a torch.dtype, "float", "int" or "bool", or None for any type.
        needs_grad: a gradient is sent back for the tensor; None: True unless ``dtype`` is an int or bool type.
        partitioned: the tensor is sharded over the tensor group in transit.
    """

    name: str = ""
    dtype: torch.dtype | str | None = "float"
    needs_grad: bool | None = None
    partitioned: bool = False

    def __post_init__(self) -> None:
        if self.needs_grad is None:
            object.__setattr__(self, "needs_grad", self.dtype_class in ("float", None))

    @property
    def dtype_class(self) -> str | None:
        """Class of ``dtype``: "float", "int", "bool", or None for any type."""
        return dtype_class_of(self.dtype) if isinstance(self.dtype, torch.dtype) else self.dtype

    def accepts(self, dtype: torch.dtype) -> bool:
        """Return True if a tensor of ``dtype`` matches the declaration."""
        return self.dtype in (None, dtype, dtype_class_of(dtype))


Records = tuple[Boundary, ...]
Declared = Records | dict[int, Records] | None


def declaration(module: Any) -> str:
    """Return a string that changes whenever the declaration of ``module`` changes."""
    return repr([getattr(module, name, None) for name in ("boundary", *LIST_NAMES)])


def declared_boundary(module: Any) -> Declared:
    """Read the declaration of ``module``, from its records or its three lists; None without a declaration.

    Raises:
        BoundaryError: the lists have unequal lengths, a type is unknown, an int or bool is declared with a gradient, or
            the module has both lists and records.
    """
    records = getattr(module, "boundary", None)
    lists = {name: list(getattr(module, name)) for name in LIST_NAMES if getattr(module, name, None) is not None}
    if records is not None:
        if lists:
            raise BoundaryError(
                f"the tensors of a boundary must be declared only once, got boundary and {', '.join(lists)}"
            )
        if isinstance(records, Mapping):
            return {int(virtual_stage): _check_records(tuple(fields)) for virtual_stage, fields in records.items()}
        return _check_records(tuple(records))
    if not lists:
        return None
    lengths = {name: len(values) for name, values in lists.items()}
    if len(set(lengths.values())) != 1:
        raise BoundaryError(f"the lists that declare the tensors of a boundary must have equal lengths, got {lengths}")
    num_tensors = next(iter(lengths.values()))
    types = lists.get("_input_type", [None] * num_tensors)
    grads = lists.get("_input_grad", [None] * num_tensors)
    partitioned = lists.get("_input_pipe_partitioned", [False] * num_tensors)
    return _check_records(tuple(Boundary("", *fields) for fields in zip(types, grads, partitioned, strict=True)))


def records_of(declared: Declared, virtual_stage: int) -> Records | None:
    """Look up the records for the output of ``virtual_stage``; None if it is not declared."""
    return declared.get(virtual_stage) if isinstance(declared, dict) else declared


def set_list(module: Any, name: str, values: Sequence[Any] | None) -> None:
    """Set the list ``name`` on ``module`` from the next call on; None removes it. Must be equal on every rank.

    The next call checks that the lists agree with each other, so they can be set one after another.

    Raises:
        BoundaryError: the name is unknown, or an entry is not valid for this list.
    """
    if name not in LIST_NAMES:
        raise BoundaryError(
            f"the lists that declare the tensors of a boundary are {', '.join(LIST_NAMES)}, got {name!r}"
        )
    if values is not None:
        if isinstance(values, (str, torch.Tensor)) or not isinstance(values, Sequence):
            raise BoundaryError(f"{name} must be a list with one entry for each tensor, got {values!r}")
        for index, value in enumerate(values):
            _check_type(index, value) if name == "_input_type" else _check_flag(name, index, value)
        values = list(values)
    setattr(module, name, values)


def _check_records(records: Records) -> Records:
    for index, record in enumerate(records):
        if not isinstance(record, Boundary):
            raise BoundaryError(f"boundary[{index}] must be a Boundary, got {record!r}")
        _check_type(index, record.dtype)
        _check_flag("_input_grad", index, record.needs_grad)
        _check_flag("_input_pipe_partitioned", index, record.partitioned)
        if record.needs_grad and record.dtype_class in ("int", "bool"):
            raise BoundaryError(
                f"only float tensors have gradients, got _input_grad[{index}]=True with _input_type[{index}]="
                f"{dtype_name(record.dtype)!r}. Set _input_grad to False, or the type to 'float'."
            )
    return records


def _check_type(index: int, value: Any) -> None:
    if value is not None and not isinstance(value, torch.dtype) and value not in DTYPE_CLASSES:
        raise BoundaryError(
            f"_input_type[{index}] must be one of {DTYPE_CLASSES}, a torch.dtype or None, got {value!r}"
        )


def _check_flag(name: str, index: int, value: Any) -> None:
    if value not in (True, False):
        raise BoundaryError(f"{name}[{index}] must be True or False, got {value!r}")
