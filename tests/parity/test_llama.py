"""LLaMA in every layout of 1, 2 and 4 ranks: losses, gradients and norms of one process, schedules and recompute."""

from __future__ import annotations

from itertools import product

import pytest

from tests.helpers.layouts import LAYOUTS, check_fp64
from tests.parity.decoder_tests import *  # noqa: F403 - tests of every decoder
from tests.parity.llama_runs import RUNS, VARIANTS

QUICK = [((2, 2, 1), "positions")]
CASES = [
    pytest.param(*grid, variant, marks=() if (grid, variant) in QUICK else pytest.mark.slow)
    for grid, variant in product(LAYOUTS, VARIANTS)
]


@pytest.mark.parametrize(("tensor", "pipe", "data", "variant"), CASES)
def test_fp64_equals_single_process(tensor: int, pipe: int, data: int, variant: str) -> None:
    """Rows E01, E04, E06, E09, E16, E17."""
    check_fp64(RUNS.compare_layout(tensor, pipe, data, f"--fp64 --clip-grad 0.5 {VARIANTS[variant]}", 3))


@pytest.mark.parametrize(
    "flag",
    [
        "--reset-position-ids",
        "--num-query-groups 1",
        "--rotary-scaling linear",
        *(
            pytest.param(flag, marks=pytest.mark.slow)
            for flag in (
                "--reset-attention-mask",
                "--rotary-base 50",
                "--activation gated-gelu",
                "--tie-embeddings-and-output-weights",
            )
        ),
    ],
)
def test_each_flag_changes_model_or_batch(flag: str) -> None:
    RUNS.check_flag_changes_loss(flag)
