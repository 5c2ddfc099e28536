"""What a checkpoint holds, in numbers: where the run stood, which layout saved it, and each tensor's size and norm."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from megatron.checkpoint import manifest
from megatron.checkpoint.loading import Checkpoint
from megatron.checkpoint.records import DTYPE_NAMES
from megatron.checkpoint.whole import read_whole

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
    """Return what the state says of the run, as plain data; what an older version did not keep is None."""
    state = checkpoint.state
    progress = state.get("progress", {})
    order = state.get("data_order")
    return {
        "path": str(checkpoint.path),
        "step": checkpoint.step,
        "updates": progress.get("updates"),
        "samples_consumed": progress.get("samples_consumed"),
        "optimizer": state.get("optimizer"),
        "optimizer_steps": state.get("optimizer_steps"),
        "scaler": state.get("scaler"),
        "layout": state.get("layout"),
        "model": state.get("model"),
        "data_fingerprint": state.get("data_fingerprint"),
        "data_order": order,
        "torch": state.get("torch"),
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


def _manifest(checkpoint: Checkpoint) -> manifest.Manifest:
    path = checkpoint.path / manifest.NAME
    return manifest.from_bytes(path.read_bytes(), path)


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
