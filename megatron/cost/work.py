"""What a rank does in a unit for one micro-batch: products, operations, and sums over the tensor ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

OPERATIONS = {"layer": 24, "decoder": 34, "embedding": 6, "norm": 2, "head": 10}
"""Kernels of a unit's forward, about; a backward has twice as many."""


@dataclass(frozen=True)
class Product:
    """``number`` products of [rows, inner] and [inner, columns].

    Args:
        is_column: with a weight whose columns are cut over the tensor ranks, so that they sum the input's gradient.
    """

    rows: int
    inner: int
    columns: int
    number: float = 1.0
    is_column: bool = False

    @property
    def flops(self) -> float:
        return 2.0 * self.rows * self.inner * self.columns * self.number

    @property
    def side(self) -> float:
        """The side of a cube with as many multiplications as one of them."""
        return float(self.rows * self.inner * self.columns) ** (1 / 3)


@dataclass(frozen=True)
class Work:
    """The forward of a unit on one rank.

    Args:
        products: with weights; backward has two for each.
        core: those of attention between queries, keys and values, which selective recompute runs again.
        operations: kernels that are started.
        sums: bytes of each sum of activations over the tensor ranks in forward, ``back`` of those in backward.
    """

    products: tuple[Product, ...] = ()
    core: tuple[Product, ...] = ()
    operations: int = 0
    sums: tuple[int, ...] = ()
    back: tuple[int, ...] = ()

    @property
    def flops(self) -> float:
        return flops_of((*self.products, *self.core))


def flops_of(products: Sequence[Product]) -> float:
    """Return the FLOPs of all of them."""
    return sum(product.flops for product in products)


def scores(queries: int, keys: int, size: int, number: float) -> tuple[Product, Product]:
    """Return the two products of ``number`` heads: with keys of ``size``, and of the probabilities with values."""
    return Product(queries, size, keys, number), Product(queries, keys, size, number)
