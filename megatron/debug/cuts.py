"""How the tensors that a module takes and gives are cut over the tensor group, as far as its weights tell.

| a module with a weight of its own, or a bias alone | takes | gives |
|---|---|---|
| cut by rows of the output (``partition_dim`` 0), and as many columns come out | all | its columns |
| the same of ``num_outputs`` n, whose outputs have every n-th row each | all | its columns of each |
| the same with more columns out (gathered), or that takes token ids (an embedding) | all | all |
| cut by columns of the input (``partition_dim`` 1), and as many columns go in | its columns | all |

With --sequence-parallel "all" is this rank's rows, of the first tensor; and so is what a module takes and gives that
has a ``place`` in which the sequence is cut. Of other modules nothing is said here: where the ranks of a tensor group
tell different numbers, they hold parts.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn

from megatron.mpu.shard import Shard


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
    shard = getattr(weight, "shard", None)
    if weight is None or not isinstance(shard, Shard) or not shard.is_partitioned:
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
