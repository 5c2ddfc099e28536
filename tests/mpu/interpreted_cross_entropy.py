"""The kernels of the cross-entropy in Triton's interpreter, on a CPU; a program of its own.

``TRITON_INTERPRET=1 python -m tests.mpu.interpreted_cross_entropy NAME`` raises if the check ``NAME`` fails. The
variable must be set before Triton is imported, and torch may import Triton.
"""

from __future__ import annotations

import itertools
import sys

import torch

from megatron.mpu.fused_cross_entropy import logits_gradient, row_statistics
from tests.helpers.harness import run_ranks
from tests.mpu.fused_cross_entropy_cases import CASES, EMPTY_SHARD_CASES, run_rank, small_blocks
from tests.mpu.test_fused_cross_entropy import formulas_as_kernels

DEADLINE_S = 300.0
"""Seconds for ranks in the interpreter."""


def kernels() -> None:
    """Each kernel writes the values of its formula, whatever its widths, strides and dtypes are."""
    generator = torch.Generator().manual_seed(1)
    widths = ((1, 1), (33, 30), (64, 0), (104, 101))
    options = (
        (torch.float32, False, 0.0), (torch.float32, True, 2.5), (torch.bfloat16, True, 2.5),
        (torch.float16, True, 0.0),
    )  # fmt: skip
    for (width, num_columns), (dtype, has_bias, cap) in itertools.product(widths, options):
        logits = (torch.randn(5, width + 3, generator=generator) * 9.0).to(dtype)[:, :width]
        logits[:, num_columns:] = float("inf")
        if num_columns > 64:
            logits[1, :64], logits[2, 70] = float("-inf"), 5000.0
        targets = torch.tensor([0, num_columns - 1, num_columns, -7, 29])
        bias = torch.randn(width, generator=generator).to(dtype) if has_bias else None
        factors, exp_factors = torch.rand(2, 5, generator=generator).unbind()
        results = []
        for run_kernels in (small_blocks, formulas_as_kernels):
            with run_kernels():
                statistics = row_statistics(logits, targets, num_columns, bias=bias, cap=cap)
                inputs = targets, num_columns, statistics[0], exp_factors, factors
                outputs = [torch.full((5, width + 8), 7.0, dtype=d)[:, :width] for d in (torch.float32, dtype)]
                for gradient in outputs:
                    logits_gradient(logits, *inputs, gradient, bias=bias, cap=cap)
                in_place = logits.clone()
                logits_gradient(in_place, *inputs, in_place, bias=bias, cap=cap)
                results.append([statistics, *outputs, in_place])
        for actual, expected in zip(*results, strict=True):
            rtol = max(2 * torch.finfo(actual.dtype).eps, 2e-6)
            torch.testing.assert_close(actual, expected, rtol=rtol, atol=2e-6)


def one_rank() -> None:
    run_rank(0, 1, small_blocks, CASES)


def two_ranks() -> None:
    """A loss in chunks with all options, and one of logits in memory."""
    run_ranks(2, run_rank, 2, small_blocks, (CASES[1], CASES[5]), deadline_s=DEADLINE_S)


def four_ranks() -> None:
    run_ranks(4, run_rank, 4, small_blocks, EMPTY_SHARD_CASES, deadline_s=DEADLINE_S)


if __name__ == "__main__":
    globals()[sys.argv[1]]()
