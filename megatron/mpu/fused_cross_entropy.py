"""The two passes of the cross-entropy over a logits matrix on CUDA, each by one Triton kernel.

| pass | reads | writes |
|---|---|---|
| ``row_statistics`` | logits [n, v/t] | maximum, sum of exponentials and target's logit: fp32 [3, n] |
| ``logits_gradient`` | logits [n, v/t] | their gradient [n, v/t], in the dtype of the following products |

Bias and soft-cap are applied to the logits as they are read. Neither exponentials nor soft-cap derivatives are stored:
exponentials are computed again from the maximum, which is cheaper than memory traffic.
"""

from __future__ import annotations

import torch

from megatron import triton_launch

MAX_BLOCK = 4096
"""Maximum number of logits that a program holds in registers: 16 per thread of 8 warps."""


def uses_kernels(x: torch.Tensor, has_kernels: bool) -> bool:
    """Return True if the kernels, which do not support fp64, compute the loss from ``x`` (hidden states or logits).

    Args:
        has_kernels: ``--fused-kernels`` permits Triton kernels.
    """
    return has_kernels and x.dtype != torch.float64 and triton_launch.is_available(x.device)


def row_statistics(
    logits: torch.Tensor, targets: torch.Tensor, num_columns: int, *, bias: torch.Tensor | None = None, cap: float = 0.0
) -> torch.Tensor:
    """Compute row statistics in fp32: maximum, sum of exponentials of differences from it, and target's logit.

    Shapes:
        logits  [n, width]; columns from ``num_columns`` are excluded
        targets [n] target columns; the logit for a target outside of the columns is reported as 0
        bias    [width] or None
        output  [3, n]

    Args:
        cap: soft-cap; 0: none.
    """
    num_rows, width = logits.shape
    statistics = logits.new_empty((3, num_rows), dtype=torch.float32)
    if not num_rows:
        return statistics
    triton_launch.launch(
        "megatron.mpu.triton_cross_entropy:statistics_kernel", (num_rows,),
        logits, logits if bias is None else bias, targets, statistics,
        num_rows, logits.stride(0), width, num_columns, cap,
        writes=(statistics,), HAS_BIAS=bias is not None, HAS_CAP=cap > 0, BLOCK=_block(width), num_warps=8,
    )  # fmt: skip
    return statistics


def logits_gradient(
    logits: torch.Tensor, targets: torch.Tensor, num_columns: int, maxima: torch.Tensor, exp_factors: torch.Tensor,
    factors: torch.Tensor, gradient: torch.Tensor, *, bias: torch.Tensor | None = None, cap: float = 0.0,
) -> torch.Tensor:  # fmt: skip
    """Write the logits' gradient to ``gradient`` and return it.

    The gradient of row i is ``exp_factors[i] * exp(logits[i] - maxima[i])``, minus ``factors[i]`` in the target column,
    times the soft-cap derivative. It is 0 in the columns from ``num_columns``.

    Shapes:
        logits, gradient               [n, width]; ``gradient`` may be ``logits``
        targets, bias                  see ``row_statistics``
        maxima, exp_factors, factors   [n] in fp32, contiguous
    """
    num_rows, width = logits.shape
    if not logits.numel():
        return gradient
    block = _block(width)
    is_in_place = gradient is logits
    triton_launch.launch(
        "megatron.mpu.triton_cross_entropy:gradient_kernel", (num_rows, -(-width // block)),
        logits, logits if bias is None else bias, targets, maxima, exp_factors, factors, gradient,
        logits.stride(0), gradient.stride(0), width, num_columns, cap,
        writes=() if is_in_place else (gradient,), updates=(gradient,) if is_in_place else (),
        HAS_BIAS=bias is not None, HAS_CAP=cap > 0, BLOCK=block, num_warps=8,
    )  # fmt: skip
    return gradient


def _block(width: int) -> int:
    """Return the number of columns that a program processes together, a power of two."""
    return min(MAX_BLOCK, max(32, 1 << (width - 1).bit_length()))
