"""What crosses a stage: declared by the user (Boundary), described by the sender (TensorMeta, structure), sent as
a header.
"""

from __future__ import annotations

import functools
import json
import logging
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tds.schedule import Placement

# What crosses from one stage to the next, as the user declares it.
#
# On the module, one entry for each tensor that crosses:
#
#     module._input_grad = [True, False]               # keeps a gradient?
#     module._input_type = ["float", "bool"]           # float, int, bool, or a torch.dtype
#     module._input_pipe_partitioned = [True, False]   # cut over the tensor group while it travels?
#
# or as records, for all boundaries or, by the piece of the model whose output it is, for each:
#
#     module.boundary = [Boundary("hidden"), Boundary("mask", "bool")]
#     module.boundary = {0: [Boundary("hidden")], 1: [Boundary("hidden"), Boundary("memory", torch.float32)]}
#
# The same on every rank. Without a declaration whatever comes travels, and a float needs a gradient where the sender's
# graph has one.

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


# How the tensors that cross a stage hang together: one tensor, or a tuple, list or dict of them.
#
# The receiving stage's layer gets what the sending one returned, in the same form and order, and may work on it in
# place.

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


# What a stage hands to itself (``is_own``) it may need in a backward, in which a change in place is then an error: what
# is detached shares the count of changes.


def entered(tensors: Sequence[torch.Tensor], is_own: bool = False) -> tuple[Tensors, list[torch.Tensor]]:
    """Return (``tensors`` as layers are given them, the leaves in which their gradients will lie).

    What is given shares the memory of ``tensors``: nothing is copied. It is no leaf that requires a gradient and no
    view of one, since autograd lets no layer work on these in place. The leaves have shapes and no memory.
    """
    leaves = [t.new_empty_strided(t.shape, [0] * t.dim()).requires_grad_() for t in tensors]
    return (_Enter.apply(tuple(tensors), is_own, *leaves) if leaves else ()), leaves


class _Enter(torch.autograd.Function):
    """From leaves to the tensors that they stand for, whose gradients are theirs."""

    @staticmethod
    def forward(ctx: Any, tensors: Tensors, is_own: bool, *leaves: torch.Tensor) -> Tensors:
        ctx.set_materialize_grads(False)
        return tuple(t.detach() if is_own else t.data for t in tensors)  # of one that is returned itself: a view

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        return None, None, *gradients


# Which layers meet at a boundary, by the names that a user knows, for the texts of errors.


@dataclass(frozen=True)
class Place:
    """One side of a boundary: the output of a stage's last layer, or the input of its first."""

    stage: int
    side: str = "output"
    layer: str = ""
    chunk: int = 0

    def tensor(self, index: int, name: str = "") -> str:
        """Return how to call one of the tensors there."""
        details = ", ".join(filter(None, [f"{name!r}" if name else "", f"of {self.layer}" if self.layer else ""]))
        return f"{self._stage} {self.side} {index}" + (f" ({details})" if details else "")

    def __str__(self) -> str:
        return f"{self._stage}" + (f" ({self.layer})" if self.layer else "")

    @property
    def _stage(self) -> str:
        return f"stage {self.stage}" + (f" chunk {self.chunk}" if self.chunk else "")


def output_place(module: Any, chunk: int, stage: int, placement: Placement) -> Place:
    """Return where the output of a piece of ``module`` leaves it."""
    bounds = _bounds(module, placement.piece(stage, chunk))
    return Place(stage, "output", layer_name(module, bounds[1] - 1) if bounds else "", chunk)


def input_place(module: Any, chunk: int, stage: int, placement: Placement) -> Place:
    """Return where a piece of ``module`` reads its input."""
    bounds = _bounds(module, placement.piece(stage, chunk))
    return Place(stage, "input", layer_name(module, bounds[0]) if bounds else "", chunk)


def layer_name(module: Any, index: int) -> str:
    """Return such as "layer 3 (Dense)" of a pipeline module; "layer 3" where it has no such layer."""
    specs = getattr(module, "_layer_specs", ())
    if not 0 <= index < len(specs):
        return f"layer {index}"
    layer = specs[index]
    while isinstance(layer, functools.partial):
        layer = layer.func
    kind = getattr(layer, "typename", None) or (layer if hasattr(layer, "__name__") else type(layer))
    return f"layer {index} ({kind.__name__})"


def _bounds(module: Any, piece: int) -> tuple[int, int] | None:
    parts = getattr(module, "parts", None)
    return (parts[piece], parts[piece + 1]) if parts is not None and piece + 1 < len(parts) else None


# What each tensor of a message is, checked on the sender's side against the declaration before anything is sent.

_log = logging.getLogger("tds")
_warned: set[str] = set()


@dataclass(frozen=True)
class TensorMeta:
    """What one tensor of a message is; the same on both sides of the wire."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    needs_grad: bool
    partitioned: bool

    def __str__(self) -> str:
        return f"{dtype_name(self.dtype)}{list(self.shape)}"


def format_tensor(tensor: torch.Tensor) -> str:
    """Return dtype and shape as a user writes them."""
    return f"{dtype_name(tensor.dtype)}{list(tensor.shape)}"


def describe(
    tensors: Sequence[torch.Tensor],
    structure: Structure,
    records: Records | None,
    place: Place,
    *,
    is_training: bool,
    marks_all: bool = False,
) -> tuple[TensorMeta, ...]:
    """Return what a stage's output is on the wire, once it matches the declaration.

    Args:
        marks_all: reentrant recompute is on, which lets every float of its output require a gradient; those that are
            declared without one then go without.

    Raises:
        BoundaryError: naming the stage, the layer, the tensor, what was declared and what was got.
    """
    if records is None:
        return tuple(
            TensorMeta(t.dtype, tuple(t.shape), is_training and t.requires_grad, partitioned=False) for t in tensors
        )
    if len(tensors) != len(records):
        raise BoundaryError(
            f"{place} must pass on the {len(records)} tensors that are declared "
            f"({', '.join(_declared(record) for record in records)}), got {len(tensors)} "
            f"({', '.join(map(format_tensor, tensors))}). "
            "Change the layer's output or _input_grad, _input_type and _input_pipe_partitioned."
        )
    names = tuple(record.name for record in records)
    if structure.keys and all(names) and structure.keys != names:
        raise BoundaryError(f"{place} must return a dict with the declared names {names} in order, got {structure}")
    names = structure.keys or names
    return tuple(
        _describe_one(tensor, record, place.tensor(index, names[index]), is_training, marks_all)
        for index, (tensor, record) in enumerate(zip(tensors, records, strict=True))
    )


def _describe_one(tensor: torch.Tensor, record: Boundary, place: str, is_training: bool, marks_all: bool) -> TensorMeta:
    got = format_tensor(tensor)
    if not record.fits(tensor.dtype):
        text = f"{place}: declared {dtype_name(record.dtype)}, got"
        if not _is_float_declared_int(record, tensor.dtype):
            raise BoundaryError(f"{text} {got}. Change the layer's output or _input_type.")
        _warn_once(f"{text} {dtype_name(tensor.dtype)}; it travels as it is, without gradient")
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
    return TensorMeta(tensor.dtype, tuple(tensor.shape), is_training and bool(record.needs_grad), record.partitioned)


def check_same(
    now: tuple[TensorMeta, ...],
    first: tuple[TensorMeta, ...],
    structures: tuple[Structure, Structure],
    place: Place,
    *,
    micro_batch: int,
    names: Sequence[str] = (),
) -> None:
    """Raise unless a later micro-batch's output is like the first one's of the call.

    Args:
        structures: of this micro-batch and of the first one.
    """
    for index, (spec, before) in enumerate(zip(now, first, strict=False)):
        if spec != before:
            grad = "" if spec.needs_grad == before.needs_grad else f" with gradient={spec.needs_grad}"
            raise BoundaryError(
                "shapes and dtypes must stay the same within one train_batch or eval_batch: "
                f"{place.tensor(index, names[index] if names else '')} was {before}, got {spec}{grad} at micro-batch "
                f"{micro_batch}. Pad the micro-batches of one call to one shape, or build the PipelineModule with "
                "dynamic_shape=True."
            )
    if len(now) != len(first) or structures[0] != structures[1]:
        raise BoundaryError(
            f"{place} returned {len(first)} tensors as {structures[1]} before, got {len(now)} as {structures[0]} at "
            f"micro-batch {micro_batch}. Return the same within one call, or build the PipelineModule with "
            "dynamic_shape=True."
        )


def check_received(specs: tuple[TensorMeta, ...], records: Records | None, place: Place, is_training: bool) -> None:
    """Raise unless what a header announces matches this rank's own declaration."""
    if records is None:
        return
    if len(specs) != len(records):
        raise BoundaryError(
            f"{place} expects the {len(records)} tensors that are declared, but {len(specs)} are announced "
            f"({', '.join(map(str, specs))}). Declare the same on every rank."
        )
    for index, (spec, record) in enumerate(zip(specs, records, strict=True)):
        grad_differs = is_training and spec.needs_grad != record.needs_grad
        dtype_differs = not record.fits(spec.dtype) and not _is_float_declared_int(record, spec.dtype)
        if dtype_differs or grad_differs or spec.partitioned != record.partitioned:
            raise BoundaryError(
                f"{place.tensor(index, record.name)}: declared here {_declared(record)} with gradient="
                f"{record.needs_grad}, partitioned={record.partitioned}; announced {spec} with gradient="
                f"{spec.needs_grad}, partitioned={spec.partitioned}. Declare the same on every rank."
            )


def _declared(record: Boundary) -> str:
    return f"{record.name} {dtype_name(record.dtype)}".strip()


def _is_float_declared_int(record: Boundary, dtype: torch.dtype) -> bool:
    """True for the habit of calling a float without gradient an int, which does no harm."""
    return record.dtype == "int" and not record.needs_grad and dtype.is_floating_point


def _warn_once(text: str) -> None:
    if text not in _warned:
        _warned.add(text)
        _log.warning(text)


# The fixed-size header that says what a message holds: dtypes, shapes, gradients, and the structure with its keys.
#
# | words | content |
# |---|---|
# | 4 | mark of tds, number of tensors, form of the structure, bytes of its keys |
# | 32 x 11 | of each tensor: dtype, flags (1 needs a gradient, 2 partitioned), dimensions, shape |
# | 128 | the keys of a dict, as JSON |

DTYPES = (
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128,
)  # fmt: skip
MAX_TENSORS = 32
MAX_DIMS = 8
MAX_KEY_BYTES = 1024
MAGIC = 0x746473
_FRONT = 4
_FIELDS = 3 + MAX_DIMS
_KEYS = _FRONT + MAX_TENSORS * _FIELDS
HEADER_SIZE = _KEYS + MAX_KEY_BYTES // 8


def encode_header(specs: Sequence[TensorMeta], structure: Structure, place: Place) -> torch.Tensor:
    """Return the header, int64 on the CPU.

    Raises:
        BoundaryError: more tensors, dimensions or names than a header holds, or a dtype that cannot travel.
    """
    if len(specs) > MAX_TENSORS:
        raise BoundaryError(f"at most {MAX_TENSORS} tensors can cross a stage, got {len(specs)} from {place}")
    keys = json.dumps(structure.keys).encode()
    if len(keys) > MAX_KEY_BYTES:
        raise BoundaryError(
            f"the keys of a dict that crosses a stage must fit into {MAX_KEY_BYTES} bytes, got {len(keys)} bytes for "
            f"{len(structure.keys)} keys from {place}, {structure.keys[0][:40]!r} first. Use shorter keys, or a tuple."
        )
    values = [MAGIC, len(specs), CONTAINERS.index(structure.form), len(keys)]
    for index, spec in enumerate(specs):
        if spec.dtype not in DTYPES or len(spec.shape) > MAX_DIMS:
            raise BoundaryError(
                f"a tensor that crosses a stage has at most {MAX_DIMS} dimensions and a plain dtype, got {spec} from "
                f"{place.tensor(index)}. Reshape it, or send it as another dtype."
            )
        flags = int(spec.needs_grad) | int(spec.partitioned) << 1
        shape = [*spec.shape, *[0] * (MAX_DIMS - len(spec.shape))]
        values += [DTYPES.index(spec.dtype), flags, len(spec.shape), *shape]
    header = torch.zeros(HEADER_SIZE, dtype=torch.int64)
    header[: len(values)] = torch.tensor(values)
    header[_KEYS:].view(torch.uint8)[: len(keys)] = torch.frombuffer(bytearray(keys), dtype=torch.uint8)
    return header


def decode_header(header: torch.Tensor) -> tuple[tuple[TensorMeta, ...], Structure]:
    """Return (what each tensor is, how they hang together)."""
    magic, number, form, num_key_bytes, *values = header.tolist()  # all at once: a device is waited for
    if magic != MAGIC:
        raise RuntimeError(f"expected a header of tds, got {magic:#x}: the stages run different schedules")
    specs = []
    for start in range(0, number * _FIELDS, _FIELDS):
        dtype, flags, dims, *shape = values[start : start + _FIELDS]
        specs.append(TensorMeta(DTYPES[dtype], tuple(shape[:dims]), bool(flags & 1), bool(flags & 2)))
    text = b"".join(word.to_bytes(8, sys.byteorder, signed=True) for word in values[_KEYS - _FRONT :])
    keys = json.loads(text[:num_key_bytes])
    return tuple(specs), Structure(CONTAINERS[form], tuple(keys))
