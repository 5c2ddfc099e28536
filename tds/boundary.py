"""What crosses from one stage to the next: declared by the user, or read off the first micro-batch.

A user declares it on the module, one entry for each tensor that crosses:

    module._input_grad = [True, False]               # keeps a gradient?
    module._input_type = ["float", "bool"]           # float, int or bool
    module._input_pipe_partitioned = [True, False]   # cut over the tensor group while it travels?

or as records, ``module.boundary = [Boundary("hidden"), Boundary("mask", kind="bool", needs_grad=False)]``.
Without a declaration whatever comes travels, and a float needs a gradient where the sender's graph has one.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

KINDS = ("float", "int", "bool")
LISTS = ("_input_grad", "_input_type", "_input_pipe_partitioned")

_log = logging.getLogger("tds")
_warned: set[str] = set()


@dataclass(frozen=True)
class Boundary:
    """One declared tensor. ``partitioned``: cut over the tensor group while it travels."""

    name: str = ""
    kind: str | None = "float"
    needs_grad: bool = True
    partitioned: bool = False


@dataclass(frozen=True)
class TensorSpec:
    """What one tensor of a message is; the same on both sides of the wire."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    needs_grad: bool
    partitioned: bool

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}"


class BoundaryError(ValueError):
    """What crosses a stage does not match what was declared, or what was sent before."""


def kind_of(dtype: torch.dtype) -> str:
    """Return "float", "int" or "bool"."""
    if dtype is torch.bool:
        return "bool"
    return "float" if dtype.is_floating_point or dtype.is_complex else "int"


def declared_boundary(module: Any) -> tuple[Boundary, ...] | None:
    """Return the records that ``module`` declares, by records or by the three lists; None if it declares nothing.

    Raises:
        BoundaryError: lists of unequal length, unknown kinds, or a gradient for what is no float.
    """
    records = getattr(module, "boundary", None)
    if records is not None:
        return _checked(tuple(records))
    lists = {name: list(getattr(module, name)) for name in LISTS if getattr(module, name, None) is not None}
    if not lists:
        return None
    lengths = {name: len(values) for name, values in lists.items()}
    if len(set(lengths.values())) != 1:
        raise BoundaryError(f"the lists that say what crosses a stage must be of one length, got {lengths}")
    size = next(iter(lengths.values()))
    kinds = lists.get("_input_type", [None] * size)
    grads = lists.get("_input_grad", [kind in ("float", None) for kind in kinds])
    cuts = lists.get("_input_pipe_partitioned", [False] * size)
    return _checked(
        tuple(
            Boundary(f"tensor {i}", kind, bool(grad), bool(cut))
            for i, (kind, grad, cut) in enumerate(zip(kinds, grads, cuts, strict=True))
        )
    )


def _checked(records: tuple[Boundary, ...]) -> tuple[Boundary, ...]:
    for index, record in enumerate(records):
        if record.kind is not None and record.kind not in KINDS:
            raise BoundaryError(f"_input_type[{index}] must be one of {KINDS}, got {record.kind!r}")
        if record.needs_grad and record.kind in ("int", "bool"):
            raise BoundaryError(
                f"only floats have gradients, got _input_grad[{index}]=True with _input_type[{index}]={record.kind!r}. "
                "Set _input_grad to False there, or the type to 'float'."
            )
    return records


def describe(
    tensors: Sequence[torch.Tensor],
    declared: tuple[Boundary, ...] | None,
    *,
    stage: int,
    is_training: bool,
    marks_all: bool = False,
) -> tuple[TensorSpec, ...]:
    """Return what a stage's output is on the wire, once it matches the declaration.

    Args:
        marks_all: reentrant recompute is on, which lets every float of its output require a gradient; those that are
            declared without one then go without.

    Raises:
        BoundaryError: naming the stage, the tensor, what was declared and what was got.
    """
    if declared is None:
        return tuple(
            TensorSpec(t.dtype, tuple(t.shape), is_training and t.requires_grad, partitioned=False) for t in tensors
        )
    if len(tensors) != len(declared):
        raise BoundaryError(
            f"stage {stage} must pass on the {len(declared)} tensors that are declared "
            f"({', '.join(str(record.kind) for record in declared)}), got {len(tensors)} "
            f"({', '.join(f'{kind_of(t.dtype)}{list(t.shape)}' for t in tensors)}). "
            "Change the layer's output or _input_grad, _input_type and _input_pipe_partitioned."
        )
    return tuple(
        _describe_one(tensor, record, f"stage {stage} output {index}", is_training, marks_all)
        for index, (tensor, record) in enumerate(zip(tensors, declared, strict=True))
    )


def _describe_one(tensor: torch.Tensor, record: Boundary, place: str, is_training: bool, marks_all: bool) -> TensorSpec:
    got = f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
    kind = kind_of(tensor.dtype)
    if record.kind is not None and kind != record.kind:
        told = f"{place}: declared {record.kind}, got {got}"
        if not (kind == "float" and record.kind == "int" and not record.needs_grad):
            raise BoundaryError(f"{told}. Change the layer's output or _input_type.")
        _warn_once(f"{told}; it travels as it is, without gradient")
    if is_training and record.needs_grad and not tensor.requires_grad:
        raise BoundaryError(
            f"{place}: declared with a gradient, got {got} that requires none. Detach nothing on its way (reentrant "
            "recompute of a layer whose input needs no gradient does that too), or set _input_grad to False."
        )
    if is_training and tensor.requires_grad and not record.needs_grad and not marks_all:
        raise BoundaryError(
            f"{place}: declared without a gradient, got {got} that requires one, which would be lost. "
            "Detach it in the layer, or set _input_grad to True."
        )
    needs_grad = is_training and record.needs_grad
    return TensorSpec(tensor.dtype, tuple(tensor.shape), needs_grad, record.partitioned)


def check_same(
    now: tuple[TensorSpec, ...], first: tuple[TensorSpec, ...], *, stage: int, micro_batch: int, names: Sequence[str]
) -> None:
    """Raise unless a later micro-batch's output is like the first one's of the call."""
    if now == first:
        return
    for index, (spec, before) in enumerate(zip(now, first, strict=False)):
        if spec != before:
            name = names[index] if index < len(names) else f"tensor {index}"
            grad = "" if spec.needs_grad == before.needs_grad else f", gradient {spec.needs_grad}"
            raise BoundaryError(
                f"shapes and dtypes must stay the same within one train_batch or eval_batch: stage {stage} output "
                f"{index} ({name}) was {before}, got {spec}{grad} at micro-batch {micro_batch}. "
                "Pad the micro-batches of one call to one shape."
            )
    raise BoundaryError(f"stage {stage} passed on {len(first)} tensors before, got {len(now)} at {micro_batch=}")


def check_received(
    specs: tuple[TensorSpec, ...], declared: tuple[Boundary, ...] | None, *, stage: int, is_training: bool
) -> None:
    """Raise unless what a header announces matches this rank's own declaration."""
    if declared is None:
        return
    if len(specs) != len(declared):
        raise BoundaryError(f"stage {stage} expects {len(declared)} tensors, but {len(specs)} are announced")
    for index, (spec, record) in enumerate(zip(specs, declared, strict=True)):
        grad_differs = is_training and spec.needs_grad != record.needs_grad
        kind_differs = record.kind not in (None, kind_of(spec.dtype)) and (record.needs_grad or record.kind != "int")
        if kind_differs or grad_differs or spec.partitioned != record.partitioned:
            raise BoundaryError(
                f"stage {stage} input {index}: declared here {record}, announced {spec} with "
                f"gradient={spec.needs_grad}, partitioned={spec.partitioned}. Declare the same on every rank."
            )


def _warn_once(text: str) -> None:
    if text not in _warned:
        _warned.add(text)
        _log.warning(text)
