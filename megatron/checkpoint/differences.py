"""Do two checkpoints hold the same tensors, and how far do they lie apart?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from megatron.checkpoint.loading import Checkpoint
from megatron.checkpoint.records import DTYPE_NAMES
from megatron.checkpoint.whole import WEIGHTS, read_whole

_CHUNK = 1 << 22  # elements that are fp64 at a time
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


def state_differences(first: Checkpoint, second: Checkpoint) -> dict[str, tuple[Any, Any]]:
    """Return what the runs' states say differently: key -> value in each. It does not make tensors unequal."""
    keys = [*first.state, *(key for key in second.state if key not in first.state)]
    values = {key: (first.state.get(key), second.state.get(key)) for key in keys}
    return {key: pair for key, pair in values.items() if pair[0] != pair[1]}


def _difference(name: str, first: Checkpoint, second: Checkpoint) -> Difference | None:
    told = [_told(checkpoint, name) for checkpoint in (first, second)]
    if None in told:
        return Difference(name, ONE_SIDE, told[0], told[1])
    if first.shape(name) != second.shape(name):
        return Difference(name, SHAPE, told[0], told[1])
    one, other = read_whole(first, name), read_whole(second, name)
    if one.dtype == other.dtype and torch.equal(_bits(one), _bits(other)):
        return None
    return Difference(name, VALUES, told[0], told[1], *_apart(one, other))


def _told(checkpoint: Checkpoint, name: str) -> str | None:
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
