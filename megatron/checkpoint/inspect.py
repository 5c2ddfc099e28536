"""What a checkpoint holds, and how two differ."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from megatron.checkpoint import metadata
from megatron.checkpoint.one_process import WEIGHTS, read_whole
from megatron.checkpoint.opened_checkpoint import Checkpoint
from megatron.checkpoint.tensor_record import DTYPE_NAMES

# What a checkpoint holds, in numbers: where the run stood, which layout saved it, and each tensor's size and norm.

_CHUNK = 1 << 22  # elements that are fp64 at a time


@dataclass(frozen=True)
class TensorFacts:
    """One tensor; what only numbers with a fraction have is None for others."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    num_files: int
    norm: float | None = None  # root of the sum of squares
    largest: float | None = None  # of the absolute values that are finite
    num_not_finite: int = 0


def run_facts(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the run's entries of the metadata as plain data; None for entries that an older version did not store."""
    metadata = checkpoint.metadata
    progress = metadata.get("progress", {})
    order = metadata.get("data_order")
    return {
        "path": str(checkpoint.path),
        "step": checkpoint.step,
        "updates": progress.get("updates"),
        "samples_consumed": progress.get("samples_consumed"),
        "tokens_consumed": progress.get("tokens_consumed"),
        "optimizer": metadata.get("optimizer"),
        "optimizer_steps": metadata.get("optimizer_steps"),
        "scaler": metadata.get("scaler"),
        "layout": metadata.get("layout"),
        "model": metadata.get("model"),
        "data_fingerprint": metadata.get("data_fingerprint"),
        "data_order": order,
        "torch": metadata.get("torch"),
    }


def file_facts(checkpoint: Checkpoint) -> dict[str, int]:
    """Return the bytes of each file; all have been read against their checksums when the checkpoint was opened."""
    return {name: facts.size for name, facts in _manifest(checkpoint).files.items()}


def tensor_facts(checkpoint: Checkpoint) -> list[TensorFacts]:
    """Return the facts of every tensor, reading one at a time."""
    index = _manifest(checkpoint).index
    return [_facts(checkpoint, name, len({p.file for p in index[name].pieces})) for name in checkpoint.names()]


def num_elements(facts: list[TensorFacts]) -> dict[str, int]:
    """Return how many numbers each kind of tensor has; the kind is what its name begins with."""
    counts: dict[str, int] = {}
    for one in facts:
        kind = one.name.partition("/")[0]
        counts[kind] = counts.get(kind, 0) + math.prod(one.shape)
    return counts


def _manifest(checkpoint: Checkpoint) -> metadata.Manifest:
    path = checkpoint.path / metadata.MANIFEST_NAME
    return metadata.manifest_from_bytes(path.read_bytes(), path)


def _facts(checkpoint: Checkpoint, name: str, num_files: int) -> TensorFacts:
    tensor = read_whole(checkpoint, name)
    held = (name, DTYPE_NAMES[tensor.dtype], tuple(tensor.shape), num_files)
    if not tensor.is_floating_point():
        return TensorFacts(*held)
    squares = largest = 0.0
    num_not_finite = 0
    for part in tensor.flatten().split(_CHUNK):
        values = part.double()
        finite = values[values.isfinite()]
        num_not_finite += values.numel() - finite.numel()
        squares += float(finite.square().sum())
        largest = max(largest, float(finite.abs().max()) if finite.numel() else 0.0)
    return TensorFacts(*held, norm=math.sqrt(squares), largest=largest, num_not_finite=num_not_finite)


# Do two checkpoints hold the same tensors, and how far do they lie apart?

ONE_SIDE, SHAPE, VALUES = "in one only", "shape", "values"


@dataclass(frozen=True)
class Difference:
    """A tensor that is not the same bits in both.

    Args:
        kind: ``ONE_SIDE``, ``SHAPE`` or ``VALUES`` (element types may differ as well).
        first, second: type and shape in each, None where it is not there.
        largest: absolute difference of an element; NaN where one alone is not a number.
        relative: root of the sum of squared differences over that of the first's squares.
    """

    name: str
    kind: str
    first: str | None
    second: str | None
    largest: float | None = None
    relative: float | None = None


def tensor_differences(first: Checkpoint, second: Checkpoint, *, weights_only: bool = False) -> list[Difference]:
    """Return the tensors that differ, in the order of ``first``, then those of ``second`` alone; none: bit-equal."""
    names = dict.fromkeys([*first.names(), *second.names()])
    kept = [name for name in names if name.startswith(WEIGHTS) or not weights_only]
    found = (_difference(name, first, second) for name in kept)
    return [difference for difference in found if difference is not None]


def metadata_differences(first: Checkpoint, second: Checkpoint) -> dict[str, tuple[Any, Any]]:
    """Return the metadata entries that differ: key -> values of both. They do not make tensors unequal."""
    keys = [*first.metadata, *(key for key in second.metadata if key not in first.metadata)]
    values = {key: (first.metadata.get(key), second.metadata.get(key)) for key in keys}
    return {key: pair for key, pair in values.items() if pair[0] != pair[1]}


def _difference(name: str, first: Checkpoint, second: Checkpoint) -> Difference | None:
    tensors = [_format_tensor(checkpoint, name) for checkpoint in (first, second)]
    if None in tensors:
        return Difference(name, ONE_SIDE, tensors[0], tensors[1])
    if first.shape(name) != second.shape(name):
        return Difference(name, SHAPE, tensors[0], tensors[1])
    one, other = read_whole(first, name), read_whole(second, name)
    if one.dtype == other.dtype and torch.equal(_bits(one), _bits(other)):
        return None
    return Difference(name, VALUES, tensors[0], tensors[1], *_apart(one, other))


def _format_tensor(checkpoint: Checkpoint, name: str) -> str | None:
    if name not in checkpoint.names():
        return None
    return f"{DTYPE_NAMES[checkpoint.dtype(name)]}{list(checkpoint.shape(name))}"


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().flatten().view(torch.uint8)


def _apart(one: torch.Tensor, other: torch.Tensor) -> tuple[float, float]:
    """Return the largest difference, and the relative one."""
    largest = apart = size = torch.zeros((), dtype=torch.float64)
    for a, b in zip(one.flatten().split(_CHUNK), other.flatten().split(_CHUNK), strict=True):
        a, b = a.double(), b.double()
        is_same = (a == b) | (a.isnan() & b.isnan())  # infinities among them
        differences = (a - b).masked_fill(is_same, 0.0).abs()
        largest = torch.maximum(largest, differences.max())  # keeps NaN
        apart, size = apart + differences.square().sum(), size + a.square().sum()
    return float(largest), float((apart / size).sqrt()) if apart > 0 or apart.isnan() else 0.0
