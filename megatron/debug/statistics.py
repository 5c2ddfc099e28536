"""Statistics and sketches that add up over cuts; how a module's tensors are cut."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from tds.param_info import Shard, info_of

# Numbers that describe a tensor and can be added up: those of its parts give those of the whole, however it is cut.
#
# Beside mean, norm and largest number there is a sketch: for each of a few rows of random signs, the sum of all numbers
# times the sign of their column. The sketches of two tensors differ by about the norm of their difference, so that a
# comparison sees what norms do not: signs, places, rounding. Signs belong to columns of the whole tensor, so slices add
# up.
#
# Source: Alon, Matias and Szegedy 1996, "The space complexity of approximating the frequency moments".

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


# How the tensors that a module takes and gives are cut over the tensor group, as far as its weights tell.
#
# | a module with a weight of its own, or a bias alone | takes | gives |
# |---|---|---|
# | cut by rows of the output (``partition_dim`` 0), and as many columns come out | all | its columns |
# | the same of ``num_outputs`` n, whose outputs have every n-th row each | all | its columns of each |
# | the same with more columns out (gathered), or that takes token ids (an embedding) | all | all |
# | cut by columns of the input (``partition_dim`` 1), and as many columns go in | its columns | all |
#
# With --sequence-parallel "all" is this rank's rows, of the first tensor; and so is what a module takes and gives that
# has a ``place`` in which the sequence is cut. Of other modules nothing is said here: where the ranks of a tensor group
# tell different numbers, they hold parts.


class Cut(NamedTuple):
    """Dimension ``dim`` holds ``length`` of ``size`` places, from ``start`` on; places beyond them are padding."""

    dim: int
    start: int
    length: int
    size: int

    def unpadded(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``x`` without its padding."""
        return x.narrow(self.dim, 0, self.length)


def own_shard(module: nn.Module) -> tuple[Shard | None, tuple[int, ...]]:
    """Return where the weight lies that is the module's own, None if it is not cut, and its shape on this rank."""
    held = module._parameters
    weight = held.get("weight") if "weight" in held else held.get("bias")
    shard = None if weight is None else info_of(weight).shard
    if weight is None or shard is None or not shard.is_partitioned:
        return None, ()
    return shard, tuple(weight.shape)


def output_cut(module: nn.Module, output: torch.Tensor, has_ids: bool, index: int = 0) -> Cut | None:
    """Return how ``output`` is cut, None if every rank holds all of it or that is not known.

    Args:
        has_ids: the module was given whole numbers.
        index: number of the output.
    """
    shard, shape = own_shard(module)
    if shard is None or shard.partition_dim != 0 or has_ids:
        return None if getattr(module, "gives_whole", False) else _rows(module, output, index)
    if output.dim() == 0:
        return None
    ways = getattr(module, "num_outputs", 1)
    if ways * output.shape[-1] != shape[0]:
        return None
    return Cut(output.dim() - 1, shard.start // ways, shard.length // ways, shard.global_shape[0] // ways)


def input_cut(module: nn.Module, given: torch.Tensor, index: int = 0) -> Cut | None:
    """Return how ``given``, input number ``index``, is cut, None if every rank has all of it or that is not known."""
    shard, shape = own_shard(module)
    if shard is None or shard.partition_dim != 1:
        return _rows(module, given, index)
    if given.dim() == 0 or given.shape[-1] != shape[1]:
        return None
    return Cut(given.dim() - 1, shard.start, shard.length, shard.global_shape[1])


def is_share(module: nn.Module, index: int, *, of_output: bool = False) -> bool:
    """Return whether the gradient of input, or output, number ``index`` is a summand of this rank.

    The gradient is the sum over the tensor group, which is taken later.
    """
    return index in getattr(module, "output_shares" if of_output else "shares", ())


def _rows(module: nn.Module, x: torch.Tensor, index: int) -> Cut | None:
    """Return the rows of the sequence that ``x`` is, None where the sequence is not cut."""
    place = getattr(module, "place", None)
    cuts = getattr(module, "sequence_parallel", False) or getattr(place, "sequence_parallel", False)
    if not cuts or index or x.dim() < 2:
        return None
    group: Any = module.group if place is None else place.group
    return Cut(0, group.rank * x.shape[0], x.shape[0], group.size * x.shape[0])


def shard_cut(shard: Shard) -> Cut | None:
    """Return how what lies at ``shard`` is cut, None if every rank holds all of it."""
    if shard.partition_dim is None:
        return None
    return Cut(shard.partition_dim, shard.start, shard.length, shard.global_shape[shard.partition_dim])
