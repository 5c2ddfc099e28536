"""Cost of a Muon update; arithmetic without torch."""

from __future__ import annotations


def newton_schulz_flops(rows: int, columns: int, steps: int = 5) -> int:
    """Count the FLOPs of the Newton-Schulz iteration for one update [rows, columns].

    With r <= c (a taller matrix is transposed), a step computes A = X X^T, A A, and a product of [r, r] with X:
    4 r^2 c + 2 r^3 FLOPs.
    """
    r, c = sorted((rows, columns))
    return steps * (4 * r * r * c + 2 * r**3)
