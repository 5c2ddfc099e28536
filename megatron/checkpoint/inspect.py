"""Describe a checkpoint's contents, and compare two checkpoints."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from megatron.checkpoint.one_process import WEIGHTS, read_full
from megatron.checkpoint.opened_checkpoint import Checkpoint
from megatron.checkpoint.tensor_record import DTYPE_NAMES

# A checkpoint's contents: run progress, the layout that saved it, and each tensor's size and norm.

_CHUNK_NUMEL = 1 << 22  # elements converted to fp64 at a time


@dataclass(frozen=True)
class TensorStats:
    """Statistics of one tensor; the norm and the largest value are None unless the tensor is floating-point."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    num_files: int
    norm: float | None = None  # L2 norm of all finite elements
    largest: float | None = None  # largest absolute value of the finite elements
    num_not_finite: int = 0


def summarize_run(checkpoint: Checkpoint) -> dict[str, Any]:
    """Collect the run's metadata as plain data; entries that an older version did not store are None."""
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


def file_sizes(checkpoint: Checkpoint) -> dict[str, int]:
    """Return file name -> size in bytes. A checkpoint in our format was verified when it was opened."""
    return {name: info.size for name, info in checkpoint.manifest.files.items()}


def compute_tensor_stats(checkpoint: Checkpoint) -> list[TensorStats]:
    """Compute statistics of every tensor, reading one tensor at a time."""
    index = checkpoint.manifest.index
    return [_tensor_stats(checkpoint, name, len({p.file for p in index[name].shards})) for name in checkpoint.names()]


def num_elements(stats: list[TensorStats]) -> dict[str, int]:
    """Count elements per tensor group; the group is the part of the name before the first "/"."""
    counts: dict[str, int] = {}
    for tensor in stats:
        group = tensor.name.partition("/")[0]
        counts[group] = counts.get(group, 0) + math.prod(tensor.shape)
    return counts


def _tensor_stats(checkpoint: Checkpoint, name: str, num_files: int) -> TensorStats:
    tensor = read_full(checkpoint, name)
    description = (name, DTYPE_NAMES[tensor.dtype], tuple(tensor.shape), num_files)
    if not tensor.is_floating_point():
        return TensorStats(*description)
    squares = largest = 0.0
    num_not_finite = 0
    for chunk in tensor.flatten().split(_CHUNK_NUMEL):
        values = chunk.double()
        finite = values[values.isfinite()]
        num_not_finite += values.numel() - finite.numel()
        squares += float(finite.square().sum())
        largest = max(largest, float(finite.abs().max()) if finite.numel() else 0.0)
    return TensorStats(*description, norm=math.sqrt(squares), largest=largest, num_not_finite=num_not_finite)


# Comparison of two checkpoints' tensors and metadata.

ONE_SIDE, SHAPE, VALUES = "in one only", "shape", "values"


@dataclass(frozen=True)
class Difference:
    """A tensor whose bits differ between two checkpoints.

    Args:
        kind: ``ONE_SIDE``, ``SHAPE`` or ``VALUES`` (dtypes may differ as well).
        first, second: type and shape in each checkpoint; None where the tensor is missing.
        largest: largest absolute elementwise difference; NaN if only one of the two elements is NaN.
        relative: L2 norm of the difference divided by the first tensor's.
    """

    name: str
    kind: str
    first: str | None
    second: str | None
    largest: float | None = None
    relative: float | None = None


def tensor_differences(first: Checkpoint, second: Checkpoint, *, weights_only: bool = False) -> list[Difference]:
    """List the differing tensors in the order of ``first``; tensors that only ``second`` has come last."""
    names = dict.fromkeys([*first.names(), *second.names()])
    compared_names = [name for name in names if name.startswith(WEIGHTS) or not weights_only]
    differences = (_difference(name, first, second) for name in compared_names)
    return [difference for difference in differences if difference is not None]


def metadata_differences(first: Checkpoint, second: Checkpoint) -> dict[str, tuple[Any, Any]]:
    """Return key -> (value in ``first``, value in ``second``) for metadata entries that differ."""
    keys = [*first.metadata, *(key for key in second.metadata if key not in first.metadata)]
    values = {key: (first.metadata.get(key), second.metadata.get(key)) for key in keys}
    return {key: pair for key, pair in values.items() if pair[0] != pair[1]}


def _difference(name: str, first: Checkpoint, second: Checkpoint) -> Difference | None:
    descriptions = [_format_tensor(checkpoint, name) for checkpoint in (first, second)]
    if None in descriptions:
        return Difference(name, ONE_SIDE, descriptions[0], descriptions[1])
    if first.shape(name) != second.shape(name):
        return Difference(name, SHAPE, descriptions[0], descriptions[1])
    first_tensor, second_tensor = read_full(first, name), read_full(second, name)
    if first_tensor.dtype == second_tensor.dtype and torch.equal(_bits(first_tensor), _bits(second_tensor)):
        return None
    return Difference(name, VALUES, descriptions[0], descriptions[1], *_value_differences(first_tensor, second_tensor))


def _format_tensor(checkpoint: Checkpoint, name: str) -> str | None:
    if name not in checkpoint.names():
        return None
    return f"{DTYPE_NAMES[checkpoint.dtype(name)]}{list(checkpoint.shape(name))}"


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().flatten().view(torch.uint8)


def _value_differences(first: torch.Tensor, second: torch.Tensor) -> tuple[float, float]:
    """Compute the largest absolute difference and the relative difference."""
    largest = squared_diff = squares = torch.zeros((), dtype=torch.float64)
    for a, b in zip(first.flatten().split(_CHUNK_NUMEL), second.flatten().split(_CHUNK_NUMEL), strict=True):
        a, b = a.double(), b.double()
        is_same = (a == b) | (a.isnan() & b.isnan())  # includes equal infinities
        differences = (a - b).masked_fill(is_same, 0.0).abs()
        largest = torch.maximum(largest, differences.max())  # propagates NaN
        squared_diff, squares = squared_diff + differences.square().sum(), squares + a.square().sum()
    return float(largest), float((squared_diff / squares).sqrt()) if squared_diff > 0 or squared_diff.isnan() else 0.0
