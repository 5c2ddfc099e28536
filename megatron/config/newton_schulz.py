"""The polynomials of the Newton-Schulz iteration and its cost; arithmetic without torch."""

from __future__ import annotations

from itertools import islice
from types import MappingProxyType

Coefficients = tuple[float, float, float]
"""a, b, c of one step, X <- a X + b (X X^T) X + c (X X^T)^2 X."""

COEFFICIENTS = MappingProxyType(
    {
        "simple": ((3.4445, -4.7750, 2.0315),),
        "quintic": (
            (4.0848, -6.8946, 2.9270),
            (3.9505, -6.3029, 2.6377),
            (3.7418, -5.5913, 2.3037),
            (2.8769, -3.1427, 1.2046),
            (2.8366, -3.0525, 1.2012),
        ),
        "polar_express": (
            (8.2051, -22.9019, 16.4607),
            (4.0664, -2.8612, 0.5184),
            (3.9096, -2.8234, 0.5250),
            (3.2856, -2.4153, 0.4853),
            (2.2779, -1.6198, 0.3985),
            (1.8726, -1.2307, 0.3585),
            (1.8564, -1.2132, 0.3568),
            (1.8750, -1.2500, 0.3750),
        ),
        "cans": (
            (8.4703, -25.1081, 18.6293),
            (4.1828, -3.1087, 0.5806),
            (3.9619, -2.9541, 0.5630),
            (3.2866, -2.4647, 0.5074),
            (2.2737, -1.6447, 0.4162),
        ),
        "aol": (
            (4.0098, -7.0585, 2.4635),
            (3.4585, -5.5479, 2.5959),
            (2.7573, -3.2939, 1.4254),
            (2.7215, -3.0494, 1.3169),
        ),
        "deepseekv4": (*((3.4445, -4.7750, 2.0315),) * 8, *((2.0, -1.5, 0.5),) * 2),
    }
)
"""Coefficients of the steps by name, in the order of the steps.

| name | origin |
|---|---|
| simple | Jordan et al. 2024, "Muon"; one polynomial for all steps, as in torch.optim.Muon |
| quintic | Cesista et al. 2025, "Squeezing 1-2 % efficiency gains out of Muon"; a period of five polynomials |
| polar_express | Amsel et al. 2025, "The Polar Express", with its safety factor 1.01 |
| cans | Grishina et al. 2025, "Accelerating Newton-Schulz iteration with Chebyshev-type polynomials" |
| aol | Boissin et al. 2025, "Turbo-Muon"; made for another normalization, which is not applied here |
| deepseekv4 | DeepSeek-V4's report: eight steps of simple, two that converge to 1 |
"""
_PERIODIC = ("simple", "quintic", "aol")
"""Names whose list starts again after its end. For the others, the last polynomial converges and is repeated."""


def step_coefficients(name: str, steps: int) -> list[Coefficients]:
    """List the coefficients of each of ``steps`` Newton-Schulz steps."""
    listed = COEFFICIENTS[name]
    num_missing = max(0, steps - len(listed))
    repeated = listed if name in _PERIODIC else listed[-1:]
    return list(islice((*listed, *repeated * num_missing), steps))


def newton_schulz_flops(rows: int, columns: int, steps: int = 5) -> int:
    """Count the FLOPs of the Newton-Schulz iteration for one update [rows, columns].

    With r <= c (a taller matrix is transposed), a step computes A = X X^T, A A, and a product of [r, r] with X:
    4 r^2 c + 2 r^3 FLOPs.
    """
    r, c = sorted((rows, columns))
    return steps * (4 * r * r * c + 2 * r**3)
