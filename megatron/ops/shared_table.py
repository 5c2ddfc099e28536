"""A table whose rows are looked up and that is a factor of a product as well, with one gradient for all."""

from __future__ import annotations

from typing import Any

import torch


def shared_table(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``weight`` twice: to look up rows in with ``sparse=True``, and for everything else.

    In backward the rows are added to the other gradient in place. Left to itself, autograd makes a table of zeros for
    each look-up and another for the sum; on a CPU, making them new at each step takes longer than a layer. In fp16
    torch has no such addition there.

    Shapes:
        weight, both outputs [v, h]
    """
    return _SharedTable.apply(weight)


class _SharedTable(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.set_materialize_grads(False)
        return weight.view_as(weight), weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> torch.Tensor | None:
        rows, rest = grads
        if rows is None:
            return rest
        return rows.to_dense() if rest is None else rest.add_(rows)
