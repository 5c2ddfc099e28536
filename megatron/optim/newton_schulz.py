"""Newton-Schulz iteration: an approximate orthogonalization of a matrix by matrix products only.

| precision | normalization and products | equals bit for bit |
|---|---|---|
| bf16 | both in bf16, after the matrix is rounded | ``torch.optim.Muon`` with the coefficients "simple" |
| medium | normalization in the dtype of the matrix, products in bf16 | ``emerging_optimizers`` with "medium" |
| high | both in the dtype of the matrix; products in TF32 where the device has it | the same with "high" |
| highest | both in the dtype of the matrix | the same with "highest" |

The names of the last three are those of ``torch.set_float32_matmul_precision``.

Source: Jordan et al. 2024, "Muon: an optimizer for hidden layers in neural networks".
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from megatron.config.newton_schulz import Coefficients

MIN_NORM = 1e-7
"""Lower bound of the norm by which a matrix is divided, so that a zero matrix stays zero."""


def exchange_dtype(precision: str, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which a matrix of ``dtype`` may be sent to the rank that orthogonalizes it."""
    return torch.bfloat16 if precision == "bf16" else dtype


def result_dtype(precision: str, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of ``newton_schulz``'s result for a matrix of ``dtype``."""
    return torch.bfloat16 if precision in ("bf16", "medium") else dtype


def newton_schulz(matrix: torch.Tensor, coefficients: Sequence[Coefficients], precision: str = "bf16") -> torch.Tensor:
    """Orthogonalize ``matrix`` [m, n] approximately, with one step per entry of ``coefficients``.

    Singular values are moved towards 1. The result may be a transposed view, in ``result_dtype``.
    """
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.to(exchange_dtype(precision, matrix.dtype))
    x = x.mT if is_tall else x
    x = torch.nn.functional.normalize(x, p=2.0, dim=(0, 1), eps=MIN_NORM)  # type: ignore[arg-type]
    x = x.to(result_dtype(precision, matrix.dtype))
    with _matmul_precision(precision):
        for a, b, c in coefficients:
            gram = x @ x.mT
            x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if is_tall else x


@contextmanager
def _matmul_precision(precision: str) -> Iterator[None]:
    """Set torch's precision of fp32 products in the block, unless they are in bf16."""
    if precision not in ("high", "highest"):
        yield
        return
    previous = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(previous)
