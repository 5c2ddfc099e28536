"""Tensor statistics that add up over slices, and the slices of a module's inputs and outputs."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from tds.param_info import Shard, info_of

# A tensor's statistics can be computed from its slices' statistics, for any split.
#
# In addition to the mean, norm and largest value, there is a sketch with ``ROWS`` values. Each value is the sum of all
# elements after every tensor column has been multiplied by a random sign. The root mean square of the difference
# of two sketches is about the norm of the tensors' difference. A comparison of sketches therefore detects differences
# in sign, position and rounding that norms do not show. Signs belong to columns of the full tensor, so the slices'
# sketches add up.
#
# Source: Alon, Matias and Szegedy 1996, "The space complexity of approximating the frequency moments".

ROWS = 8
"""Number of rows of signs. With 8 rows, the estimated norm of a difference is accurate to about a quarter."""


@dataclass(frozen=True)
class Statistics:
    """Statistics over a tensor's finite elements, in fp64; ``nan`` and ``inf`` count the others.

    ``largest`` is the largest absolute value. ``sketch`` is empty if the column positions in the full tensor
    are unknown. ``norm`` and ``largest`` of a sum are NaN: the statistics of its summands do not determine them.
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
        """Compute the statistics for ``factor`` times the tensor."""
        scaled = tuple(factor * value for value in self.sketch)
        abs_factor = abs(factor)
        return replace(
            self, mean=factor * self.mean, norm=abs_factor * self.norm, largest=abs_factor * self.largest, sketch=scaled
        )


def zero_statistics(count: int) -> Statistics:
    """Build the statistics for ``count`` zeros."""
    return Statistics(count, 0.0, 0.0, 0.0, sketch=(0.0,) * ROWS)


def join_statistics(shards: list[Statistics]) -> Statistics:
    """Join the statistics over ``shards`` of a tensor, given in any order."""
    count = sum(shard.count for shard in shards)
    has_sketch = all(shard.sketch for shard in shards)
    return Statistics(
        count=count,
        mean=math.fsum(shard.total for shard in shards) / max(count, 1),
        norm=math.hypot(*(shard.norm for shard in shards)),
        largest=max(shard.largest for shard in shards),
        nan=sum(shard.nan for shard in shards),
        inf=sum(shard.inf for shard in shards),
        sketch=tuple(map(math.fsum, zip(*(shard.sketch for shard in shards), strict=True))) if has_sketch else (),
    )


def sum_statistics(summands: list[Statistics]) -> Statistics:
    """Combine the statistics for a sum of tensors with equal shapes; ``norm`` and ``largest`` are NaN."""
    if len(summands) == 1:
        return summands[0]
    total = join_statistics(summands)
    return replace(
        total,
        count=summands[0].count,
        mean=math.fsum(summand.mean for summand in summands),
        norm=math.nan,
        largest=math.nan,
        nan=max(summand.nan for summand in summands),
        inf=max(summand.inf for summand in summands),
    )


@torch.no_grad()
def measure(x: torch.Tensor, first_column: int = 0) -> Statistics:
    """Compute the statistics for ``x``, a tensor with any dtype.

    Args:
        first_column: index in the full tensor of the first column (last dimension) of ``x``.
    """
    count = x.numel()
    if count == 0:
        return zero_statistics(0)
    x_fp64 = x.detach().double()
    values = _measure_values(x_fp64, first_column)
    nan = inf = 0
    if not all(map(math.isfinite, values)):
        nan, inf = int(x_fp64.isnan().sum()), int(x_fp64.isinf().sum())
        values = _measure_values(x_fp64.nan_to_num(0.0, 0.0, 0.0), first_column)
    total, norm, smallest, largest, *sketch = values
    return Statistics(count, total / count, norm, max(largest, -smallest), nan, inf, tuple(sketch))


def _measure_values(x_fp64: torch.Tensor, first_column: int) -> list[float]:
    """Compute sum, norm, minimum, maximum and sketch with a single copy from the device."""
    rows = x_fp64.reshape(-1, x_fp64.shape[-1]) if x_fp64.dim() else x_fp64.reshape(1, 1)
    columns = rows.sum(0)  # [n]
    sketch = signs(first_column, columns.numel(), x_fp64.device) @ columns
    smallest, largest = rows.aminmax()
    head = torch.stack([columns.sum(), torch.linalg.vector_norm(rows), smallest, largest])
    values: list[float] = torch.cat([head, sketch]).tolist()
    return values


@functools.lru_cache(maxsize=256)
def signs(first_column: int, num_columns: int, device: torch.device) -> torch.Tensor:
    """Generate the signs for ``num_columns`` columns, starting at ``first_column``.

    Shapes:
        output [ROWS, num_columns]

    Source: Steele, Lea and Flood 2014, "Fast splittable pseudorandom number generators" (bit mixing).
    """
    mixed = np.arange(first_column + 1, first_column + num_columns + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    bits = (mixed[None, :] >> np.arange(32, 32 + ROWS, dtype=np.uint64)[:, None]) & np.uint64(1)
    return torch.from_numpy(2.0 * bits.astype(np.float64) - 1.0).to(device)


# A rank's slices of module inputs and outputs, as implied by the module's weight (by its bias if it has no weight).
#
# | weight | inputs | outputs |
# |---|---|---|
# | column parallel (``partition_dim`` 0), local output | full | local columns |
# | column parallel with n = ``num_outputs`` outputs, output i from rows i, i + n, ... | full | local columns of each |
# | column parallel, gathered output; or vocabulary parallel (the inputs are token ids) | full | full |
# | row parallel (``partition_dim`` 1), local input | local columns | full |
#
# With sequence parallelism, "full" means this rank's rows for the first input and the first output. A module uses it if
# ``sequence_parallel`` is set on the module or on its parallel context (attribute ``parallel``). The slices of other
# modules are unknown: ranks in a tensor group are assumed to hold slices if their statistics differ.


class ShardSlice(NamedTuple):
    """A rank's slice [``start``, ``start + length``) of a full tensor with ``size`` indices in dimension ``dim``.

    Local indices from ``length`` on are padding.
    """

    dim: int
    start: int
    length: int
    size: int

    def unpadded(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``x`` without padding."""
        return x.narrow(self.dim, 0, self.length)


def weight_shard(module: nn.Module) -> tuple[Shard | None, tuple[int, ...]]:
    """Look up the shard and the local shape of the module's weight; (None, ()) if it is not sharded."""
    parameters = module._parameters
    weight = parameters.get("weight") if "weight" in parameters else parameters.get("bias")
    shard = None if weight is None else info_of(weight).shard
    if weight is None or shard is None or not shard.is_partitioned:
        return None, ()
    return shard, tuple(weight.shape)


def output_slice(module: nn.Module, output: torch.Tensor, has_ids: bool, index: int = 0) -> ShardSlice | None:
    """Find this rank's slice of ``output``; None if every rank holds the full tensor or the slice is unknown.

    Args:
        has_ids: the module's inputs include integers, such as token ids.
        index: output index.
    """
    shard, shape = weight_shard(module)
    if shard is None or shard.partition_dim != 0 or has_ids:
        return None if getattr(module, "has_replicated_output", False) else _sequence_slice(module, output, index)
    if output.dim() == 0:
        return None
    n = getattr(module, "num_outputs", 1)
    if n * output.shape[-1] != shape[0]:
        return None
    return ShardSlice(output.dim() - 1, shard.start // n, shard.length // n, shard.global_shape[0] // n)


def input_slice(module: nn.Module, x: torch.Tensor, index: int = 0) -> ShardSlice | None:
    """Find this rank's slice of ``x``, the module's input ``index``; None if ``x`` is full or the slice unknown."""
    shard, shape = weight_shard(module)
    if shard is None or shard.partition_dim != 1:
        return _sequence_slice(module, x, index)
    if x.dim() == 0 or x.shape[-1] != shape[1]:
        return None
    return ShardSlice(x.dim() - 1, shard.start, shard.length, shard.global_shape[1])


def is_share(module: nn.Module, index: int, *, of_output: bool = False) -> bool:
    """Check if the gradient for input (or output) ``index`` is a partial sum over the tensor group."""
    return index in getattr(module, "output_shares" if of_output else "shares", ())


def _sequence_slice(module: nn.Module, x: torch.Tensor, index: int) -> ShardSlice | None:
    """Find this rank's slice of ``x`` along the sequence; None if the sequence is not sharded."""
    ctx = getattr(module, "parallel", None) or getattr(module, "place", None)  # ``place`` is the former name
    is_sharded = getattr(module, "sequence_parallel", False) or getattr(ctx, "sequence_parallel", False)
    if not is_sharded or index or x.dim() < 2:
        return None
    group: Any = module.group if ctx is None else ctx.group
    return ShardSlice(0, group.rank * x.shape[0], x.shape[0], group.size * x.shape[0])


def slice_of_shard(shard: Shard) -> ShardSlice | None:
    """Convert ``shard`` to this rank's slice; None if every rank holds the full tensor."""
    if shard.partition_dim is None:
        return None
    return ShardSlice(shard.partition_dim, shard.start, shard.length, shard.global_shape[shard.partition_dim])
