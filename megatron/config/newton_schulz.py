"""Cost of a Muon update of a matrix; arithmetic without torch."""

from __future__ import annotations


def newton_schulz_flops(rows: int, columns: int, steps: int = 5) -> int:
    """Return the FLOPs that make an update [rows, columns] nearly orthogonal.

    A step computes ``X X^T``, its square, and that times X, where X is transposed to have fewer rows: 4 r^2 c + 2 r^3.
    """
    r, c = sorted((rows, columns))
    return steps * (4 * r * r * c + 2 * r**3)
