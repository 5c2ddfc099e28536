"""TensorMeta: dtype, shape and flags of a message's tensors, and checks against the declaration."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tds.p2p.boundary import Boundary, BoundaryError, Records, dtype_name
from tds.p2p.boundary_layers import BoundarySide
from tds.p2p.structure import Structure

_log = logging.getLogger("tds")
_warned: set[str] = set()


@dataclass(frozen=True)
class TensorMeta:
    """Description of one tensor in a message, equal on both sides."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    needs_grad: bool
    partitioned: bool

    def __str__(self) -> str:
        return f"{dtype_name(self.dtype)}{list(self.shape)}"


def format_tensor(tensor: torch.Tensor) -> str:
    """Format dtype and shape, such as "float32[4, 128]"."""
    return f"{dtype_name(tensor.dtype)}{list(tensor.shape)}"


def describe(
    tensors: Sequence[torch.Tensor],
    structure: Structure,
    records: Records | None,
    side: BoundarySide,
    *,
    is_training: bool,
    marks_all: bool = False,
) -> tuple[TensorMeta, ...]:
    """Check a stage's output against the declaration and describe each tensor.

    Args:
        records: this boundary's declaration; None: it is not declared.
        side: the output's name for error messages.
        marks_all: reentrant recompute is on, which makes every float output require a gradient. Floats declared without
            a gradient are then sent without one instead of raising an error.

    Raises:
        BoundaryError: the output does not match. The message names the stage, the layer, the tensor, the declaration
            and the actual value.
    """
    if records is None:
        return tuple(
            TensorMeta(t.dtype, tuple(t.shape), is_training and t.requires_grad, partitioned=False) for t in tensors
        )
    if len(tensors) != len(records):
        raise BoundaryError(
            f"{side} must return the {len(records)} declared tensors "
            f"({', '.join(_format_declared(record) for record in records)}), got {len(tensors)} "
            f"({', '.join(map(format_tensor, tensors))}). "
            "Change the layer's output or _input_grad, _input_type and _input_pipe_partitioned."
        )
    names = tuple(record.name for record in records)
    if structure.keys and all(names) and structure.keys != names:
        raise BoundaryError(f"{side} must return a dict with the declared names {names} in order, got {structure}")
    names = structure.keys or names
    return tuple(
        _describe_tensor(tensor, record, side.describe_tensor(index, names[index]), is_training, marks_all)
        for index, (tensor, record) in enumerate(zip(tensors, records, strict=True))
    )


def _describe_tensor(
    tensor: torch.Tensor, record: Boundary, location: str, is_training: bool, marks_all: bool
) -> TensorMeta:
    got = format_tensor(tensor)
    if not record.accepts(tensor.dtype):
        text = f"{location}: declared {dtype_name(record.dtype)}, got"
        if not _is_float_declared_int(record, tensor.dtype):
            raise BoundaryError(f"{text} {got}. Change the layer's output or _input_type.")
        _warn_once(f"{text} {dtype_name(tensor.dtype)}; it is sent unchanged, without a gradient")
    if is_training and record.needs_grad and not tensor.requires_grad:
        raise BoundaryError(
            f"{location}: declared with a gradient, got {got} that requires none. Do not detach it (reentrant "
            "recompute of a layer whose input needs no gradient detaches it too), or set _input_grad to False."
        )
    if is_training and tensor.requires_grad and not record.needs_grad and not marks_all:
        raise BoundaryError(
            f"{location}: declared without a gradient, got {got} that requires one, which would be lost. "
            "Detach it in the layer, or set _input_grad to True."
        )
    return TensorMeta(tensor.dtype, tuple(tensor.shape), is_training and bool(record.needs_grad), record.partitioned)


def check_same(
    current: tuple[TensorMeta, ...],
    first: tuple[TensorMeta, ...],
    structures: tuple[Structure, Structure],
    side: BoundarySide,
    *,
    micro_batch: int,
    names: Sequence[str] = (),
) -> None:
    """Raise BoundaryError if two micro-batches' outputs in a call have different descriptions.

    Args:
        current: describes the output for ``micro_batch``.
        first: describes the call's first output.
        structures: both outputs' structures, in this order.
    """
    for index, (spec, expected) in enumerate(zip(current, first, strict=False)):
        if spec != expected:
            grad_text = "" if spec.needs_grad == expected.needs_grad else f" with gradient={spec.needs_grad}"
            raise BoundaryError(
                "shapes and dtypes must stay the same within one train_batch or eval_batch: "
                f"{side.describe_tensor(index, names[index] if names else '')} was {expected}, got {spec}{grad_text} "
                f"at micro-batch {micro_batch}. Pad the micro-batches of one call to one shape, or build the "
                "PipelineModule with dynamic_shape=True."
            )
    if len(current) != len(first) or structures[0] != structures[1]:
        raise BoundaryError(
            f"{side} returned {len(first)} tensors as {structures[1]} before, got {len(current)} as {structures[0]} at "
            f"micro-batch {micro_batch}. Return the same structure within one call, or build the PipelineModule with "
            "dynamic_shape=True."
        )


def check_received(
    specs: tuple[TensorMeta, ...], records: Records | None, side: BoundarySide, is_training: bool
) -> None:
    """Raise BoundaryError if a header's tensors do not match this rank's declaration."""
    if records is None:
        return
    if len(specs) != len(records):
        raise BoundaryError(
            f"{side} expects the {len(records)} declared tensors, but the sender announces {len(specs)} "
            f"({', '.join(map(str, specs))}). Use the same declaration on every rank."
        )
    for index, (spec, record) in enumerate(zip(specs, records, strict=True)):
        grad_differs = is_training and spec.needs_grad != record.needs_grad
        dtype_differs = not record.accepts(spec.dtype) and not _is_float_declared_int(record, spec.dtype)
        if dtype_differs or grad_differs or spec.partitioned != record.partitioned:
            raise BoundaryError(
                f"{side.describe_tensor(index, record.name)}: declared on this rank as {_format_declared(record)} with "
                f"gradient={record.needs_grad}, partitioned={record.partitioned}; the sender announces {spec} with "
                f"gradient={spec.needs_grad}, partitioned={spec.partitioned}. Use the same declaration on every rank."
            )


def _format_declared(record: Boundary) -> str:
    return f"{record.name} {dtype_name(record.dtype)}".strip()


def _is_float_declared_int(record: Boundary, dtype: torch.dtype) -> bool:
    """Return True for a float declared as "int" without a gradient, a common and harmless practice."""
    return record.dtype == "int" and not record.needs_grad and dtype.is_floating_point


def _warn_once(text: str) -> None:
    if text not in _warned:
        _warned.add(text)
        _log.warning(text)
