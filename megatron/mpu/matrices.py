"""Matrices: which matrices the rows of a weight are of, for optimizers that look at whole matrices."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

# A packed weight holds several matrices whose rows take turns, so that any cut into whole periods gives each tensor
# rank as much of each.
#
# | weight | rows of a period | periods |
# |---|---|---|
# | query, key, value of self-attention | (a/g) d of queries, d of keys, d of values | g, the query groups |
# | key, value of attention to the encoder | d of keys, d of values | a, the heads |
# | gate and up of a gated feed-forward | 1 of the gate, 1 of up | f |
# | every other weight of a layer | all | 1 |


@dataclass(frozen=True)
class Matrices:
    """The matrices in a weight [m, n] of a layer.

    Args:
        widths: rows of each matrix in a period; none: the weight is one matrix.
        head: rows of an attention head, where each matrix has whole heads; 0: it has no heads along its rows.
        is_apart: each period is a matrix of its own.
    """

    widths: tuple[int, ...] = ()
    head: int = 0
    is_apart: bool = False

    def split(self, *, qkv: bool = True, heads: bool = False) -> Matrices:
        """Return the matrices with query, key and value as one unless ``qkv``, or each head apart with ``heads``."""
        if not self.head:
            return self
        if heads:
            return Matrices((self.head,), self.head, is_apart=True)
        return self if qkv else Matrices()

    def views(self, whole: torch.Tensor) -> list[torch.Tensor]:
        """Return the view [periods, rows of a period, n] of each matrix in ``whole`` [m, n]; ``flatten(0, 1)`` is it.

        Raises:
            ValueError: m is not a multiple of the period.
        """
        period = sum(self.widths) or len(whole)
        if len(whole) % period:
            raise ValueError(f"the rows of a packed weight must be a multiple of {period}, got {len(whole)}")
        by_period = whole.unflatten(0, (-1, period))
        if self.is_apart:
            return list(by_period.split(1))
        return list(by_period.split(list(self.widths), 1)) if self.widths else [by_period]

    def shapes(self, shape: Sequence[int]) -> list[tuple[int, int]]:
        """Return (rows, columns) of each matrix of a weight of this ``shape``."""
        views = self.views(torch.empty(tuple(shape), device="meta"))
        return [(math.prod(view.shape[:2]), view.shape[2]) for view in views]


def set_matrices(parameter: torch.nn.Parameter, widths: Sequence[int] = (), head: int = 0) -> torch.nn.Parameter:
    """Record that ``parameter`` [m, n] is a weight of a layer made of ``Matrices``; layers call it at construction."""
    parameter.matrices = Matrices(tuple(widths), head)  # type: ignore[attr-defined]
    return parameter


def matrices_of(parameter: torch.Tensor) -> Matrices | None:
    """Return the matrices in ``parameter``; None: it is no matrix of a layer (an embedding, a head, a norm, a bias)."""
    return getattr(parameter, "matrices", None)
