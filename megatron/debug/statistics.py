"""Numbers that describe a tensor and can be added up: those of its parts give those of the whole, however it is cut.

Beside mean, norm and largest number there is a sketch: for each of a few rows of random signs, the sum of all numbers
times the sign of their column. The sketches of two tensors differ by about the norm of their difference, so that a
comparison sees what norms do not: signs, places, rounding. Signs belong to columns of the whole tensor, so slices add
up.

Source: Alon, Matias and Szegedy 1996, "The space complexity of approximating the frequency moments".
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace

import numpy as np
import torch

ROWS = 8
"""Rows of signs: the norm of a difference is known to about a quarter."""


@dataclass(frozen=True)
class Statistics:
    """Of the finite numbers of a tensor, in fp64; ``nan`` and ``inf`` count the others. ``largest`` is absolute.

    ``sketch`` is empty where the places of the columns in the whole tensor are not known; ``norm`` and ``largest`` are
    NaN where a sum is known by those of its summands alone.
    """

    count: int
    mean: float
    norm: float
    largest: float
    nan: int = 0
    inf: int = 0
    sketch: tuple[float, ...] = ()

    @property
    def total(self) -> float:
        return self.mean * self.count

    @property
    def is_finite(self) -> bool:
        return not (self.nan or self.inf)

    def times(self, factor: float) -> Statistics:
        """Return the statistics of ``factor`` times the tensor."""
        scaled = tuple(factor * value for value in self.sketch)
        size = abs(factor)
        return replace(self, mean=factor * self.mean, norm=size * self.norm, largest=size * self.largest, sketch=scaled)


def zeros(count: int) -> Statistics:
    """Return the statistics of ``count`` zeros."""
    return Statistics(count, 0.0, 0.0, 0.0, sketch=(0.0,) * ROWS)


def joined(parts: list[Statistics]) -> Statistics:
    """Return the statistics of the tensor of which these are the parts, in any order."""
    count = sum(part.count for part in parts)
    has_sketch = all(part.sketch for part in parts)
    return Statistics(
        count=count,
        mean=math.fsum(part.total for part in parts) / max(count, 1),
        norm=math.hypot(*(part.norm for part in parts)),
        largest=max(part.largest for part in parts),
        nan=sum(part.nan for part in parts),
        inf=sum(part.inf for part in parts),
        sketch=tuple(map(math.fsum, zip(*(part.sketch for part in parts), strict=True))) if has_sketch else (),
    )


def summed(parts: list[Statistics]) -> Statistics:
    """Return what is known of the sum of tensors of one shape: mean and sketch."""
    if len(parts) == 1:
        return parts[0]
    whole = joined(parts)
    return replace(
        whole,
        count=parts[0].count,
        mean=math.fsum(part.mean for part in parts),
        norm=math.nan,
        largest=math.nan,
        nan=max(part.nan for part in parts),
        inf=max(part.inf for part in parts),
    )


@torch.no_grad()
def measure(x: torch.Tensor, first_column: int = 0) -> Statistics:
    """Return the statistics of ``x``, whatever its type; ``x`` stays as it is.

    Args:
        first_column: number of its first column (of the last dimension) in the whole tensor.
    """
    count = x.numel()
    if count == 0:
        return zeros(0)
    wide = x.detach().double()
    values = _values(wide, first_column)
    nan = inf = 0
    if not all(map(math.isfinite, values)):
        nan, inf = int(wide.isnan().sum()), int(wide.isinf().sum())
        values = _values(wide.nan_to_num(0.0, 0.0, 0.0), first_column)
    total, norm, smallest, largest, *sketch = values
    return Statistics(count, total / count, norm, max(largest, -smallest), nan, inf, tuple(sketch))


def _values(wide: torch.Tensor, first_column: int) -> list[float]:
    """Return sum, norm, smallest and largest number, and the sketch; asks the device once."""
    rows = wide.reshape(-1, wide.shape[-1]) if wide.dim() else wide.reshape(1, 1)
    columns = rows.sum(0)  # [n]
    sketch = signs(first_column, columns.numel(), wide.device) @ columns
    smallest, largest = rows.aminmax()
    head = torch.stack([columns.sum(), torch.linalg.vector_norm(rows), smallest, largest])
    found: list[float] = torch.cat([head, sketch]).tolist()
    return found


@functools.lru_cache(maxsize=256)
def signs(first: int, number: int, device: torch.device) -> torch.Tensor:
    """Return the signs of the columns from ``first`` on.

    Shapes:
        output [ROWS, number]

    Source: Steele, Lea and Flood 2014, "Fast splittable pseudorandom number generators" (the mixing of bits).
    """
    mixed = np.arange(first + 1, first + number + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    bits = (mixed[None, :] >> np.arange(32, 32 + ROWS, dtype=np.uint64)[:, None]) & np.uint64(1)
    return torch.from_numpy(2.0 * bits.astype(np.float64) - 1.0).to(device)
