"""torch.distributed's collectives with type rules, in one process: they move no data between ranks.

| collective | input | output |
|---|---|---|
| all_reduce, sum | P, V | R |
| all_reduce, maximum or minimum | V, R, I | R |
| all_gather, all_gather_single | V | R |
| reduce_scatter_single | P, V | V |
| all_to_all_single | V | V |

The values are those of a world in which every rank has the data of this one, except that sums are not computed. Shapes,
counts of rows and finite values are therefore realistic.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import spmd_types as spmd
import torch
import torch.distributed as dist
from spmd_types import I, P, R, V

from megatron.torch_compat import name_of
from tests.types.local_types import require, set_types, types_of


class _FinishedWork:
    """Handle of a collective that has finished."""

    def wait(self) -> None:
        """Return at once."""


def _convert(x: torch.Tensor, group: Any, allowed: tuple[Any, ...], result: Any, name: str) -> dict[Any, Any] | None:
    """Return the types of the output of a collective with input ``x``; None if types are not checked."""
    if not spmd.is_type_checking():
        return None
    axes = require(x, group, allowed, f"the input of {name}")
    return {**types_of(x), **dict.fromkeys(axes, result)}


def _fill(out: torch.Tensor, values: torch.Tensor, types: dict[Any, Any] | None) -> None:
    with spmd.no_typecheck():
        out.copy_(values.view_as(out))
        base = out._base
    if types is None:
        return
    set_types(out, types)
    if base is not None and base.numel() == out.numel():  # the output is a view of the whole buffer that is read later
        set_types(base, types)


def all_reduce(x: torch.Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False) -> Any:
    """Replace ``torch.distributed.all_reduce``."""
    types = _convert(x, group, *(((P, V), R) if op == dist.ReduceOp.SUM else ((V, R, I), R)), "all_reduce")
    if types is not None:
        set_types(x, types)
    return _FinishedWork() if async_op else None


def all_gather(shards: list[torch.Tensor], x: torch.Tensor, group: Any = None, async_op: bool = False) -> Any:
    """Replace ``torch.distributed.all_gather``."""
    types = _convert(x, group, (V,), R, "all_gather")
    for shard in shards:
        _fill(shard, x, types)
    return _FinishedWork() if async_op else None


def all_gather_single(out: torch.Tensor, x: torch.Tensor, group: Any = None, async_op: bool = False) -> Any:
    """Replace ``torch.distributed.all_gather_single``."""
    types = _convert(x, group, (V,), R, "all_gather")
    with spmd.no_typecheck():
        gathered = torch.cat([x] * (out.numel() // max(x.numel(), 1)))
    _fill(out, gathered, types)
    return _FinishedWork() if async_op else None


def reduce_scatter_single(out: torch.Tensor, x: torch.Tensor, group: Any = None, async_op: bool = False) -> Any:
    """Replace ``torch.distributed.reduce_scatter_single``."""
    types = _convert(x, group, (P, V), V, "reduce_scatter")
    with spmd.no_typecheck():
        shard = x.flatten()[: out.numel()]
    _fill(out, shard, types)
    return _FinishedWork() if async_op else None


def all_to_all_single(
    out: torch.Tensor,
    x: torch.Tensor,
    output_split_sizes: Any = None,
    input_split_sizes: Any = None,
    group: Any = None,
    async_op: bool = False,
) -> Any:
    """Replace ``torch.distributed.all_to_all_single``."""
    types = _convert(x, group, (V,), V, "all_to_all")
    with spmd.no_typecheck():
        values = torch.zeros_like(out)
        num_rows = min(len(out), len(x))
        values[:num_rows] = x[:num_rows]
    _fill(out, values, types)
    return _FinishedWork() if async_op else None


@contextmanager
def typed_collectives() -> Iterator[None]:
    """Use the collectives of this file in the block."""
    replacements = {
        "all_reduce": all_reduce,
        "all_gather": all_gather,
        "all_to_all_single": all_to_all_single,
        name_of("all_gather_single"): all_gather_single,
        name_of("reduce_scatter_single"): reduce_scatter_single,
    }
    with patch.multiple(dist, **replacements):
        yield
