"""A bias by the distance between query and key: the 2s - 1 numbers of a head, and the matrix [s, s] that they make.

The numbers are all that autograd sees of the bias; they are spread where they are added to scores.
"""

from __future__ import annotations

from typing import Any

import torch

from megatron.ops.attention import lowest


def without_future(by_distance: torch.Tensor) -> torch.Tensor:
    """Return the bias with the lowest number for keys to the right of the query: the causal rule, for nothing.

    Shapes:
        by_distance, output [a, 2s - 1]
    """
    size = by_distance.shape[1]
    future = torch.arange(size, device=by_distance.device) > size // 2
    return by_distance.masked_fill(future, lowest(by_distance.dtype))


def spread(by_distance: torch.Tensor) -> torch.Tensor:
    """Return the matrix of each head whose entry (i, j) is that of the distance j - i.

    Shapes:
        by_distance [a, 2s - 1]
        output      [a, s, s]
    """
    return _Spread.apply(by_distance)


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, by_distance: torch.Tensor) -> torch.Tensor:
        return spread_values(by_distance)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return diagonal_sums(grads[0])


def spread_values(by_distance: torch.Tensor) -> torch.Tensor:
    """Return ``spread``, not seen by autograd."""
    size = (by_distance.shape[1] + 1) // 2
    windows = by_distance.contiguous().unfold(1, size, 1)  # [a, s, s], row k from distance k - (s - 1) on
    return windows.flip(1)


def diagonal_sums(matrices: torch.Tensor) -> torch.Tensor:
    """Return the sums along the diagonals of [a, s, s] as [a, 2s - 1]: the transpose of ``spread_values``.

    On a CPU the heads take turns in memory that stays in its caches; elsewhere turns would be kernels too small.
    """
    return sums_of_some(matrices, 1 if matrices.device.type == "cpu" else len(matrices))


def sums_of_some(matrices: torch.Tensor, at_once: int) -> torch.Tensor:
    """Return ``diagonal_sums``, made of so many heads at once; their number is a multiple of it.

    Row i of a matrix is put down i places to the left, in rows of 2s, so that columns are distances.
    """
    size = matrices.shape[-1]
    rows = matrices.new_zeros(at_once, size, 2 * size)
    squares = rows.as_strided((at_once, size, size), (2 * size * size, 2 * size - 1, 1), size - 1)
    sums = matrices.new_empty(matrices.shape[0], 2 * size)
    for first in range(0, len(matrices), max(at_once, 1)):
        squares.copy_(matrices[first : first + at_once])
        torch.sum(rows, dim=1, out=sums[first : first + at_once])
    return sums[:, :-1]
