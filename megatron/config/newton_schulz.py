"""What one update of a matrix by Muon costs: arithmetic without torch."""

from __future__ import annotations


def newton_schulz_flops(rows: int, columns: int, steps: int = 5) -> int:
    """Return the floating-point operations that make an update [rows, columns] nearly orthogonal.

    A step takes the products ``X X^T``, its square, and that times X, where X has the fewer rows: 4 r^2 c + 2 r^3.
    """
    r, c = sorted((rows, columns))
    return steps * (4 * r * r * c + 2 * r**3)
