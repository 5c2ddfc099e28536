"""Parallel residuals, xIELU, LongRoPE, temperatures, logit scales and norms per head in every layout.

The short run has one layout for each kind of ranks: tensor ranks, which share the parameters of xIELU and divide the
norms of heads, and context ranks, which need positions and lengths of the full sequence.
"""

from __future__ import annotations

import pytest

from megatron.training.parity import Difference
from tests.parity.dense_runs import EXTRA, RUNS, VARIANTS
from tests.parity.test_schedules import INTERLEAVED, ZB_V, ZERO_BUBBLE

RECOMPUTE, SELECTIVE, SEQUENCE_PARALLEL = (
    "--checkpoint-activations", "--recompute-granularity selective", "--sequence-parallel"
)  # fmt: skip
A2A = "--cp-comm-type a2a"
GRIDS = [
    (2, 1, 1, 1), (1, 2, 1, 1), (1, 1, 2, 1), (1, 1, 1, 2), (2, 2, 1, 1), (2, 1, 1, 2), (1, 2, 1, 2), (2, 1, 2, 1),
    (2, 2, 1, 2),
]  # fmt: skip
"""(tensor, pipe, data, context), of 2 to 8 ranks."""
CASES = [
    *((variant, grid, "") for variant in VARIANTS for grid in GRIDS),
    *((variant, grid, SEQUENCE_PARALLEL) for variant in VARIANTS for grid in GRIDS if grid[0] > 1),
    *((variant, (1, 1, 1, 2), A2A) for variant in VARIANTS),
    *((variant, (2, 1, 1, 1), f"{SEQUENCE_PARALLEL} {RECOMPUTE}") for variant in VARIANTS),
    *((variant, (1, 1, 1, 2), SELECTIVE) for variant in VARIANTS),
    *((variant, (1, 2, 1, 1), schedule) for variant in VARIANTS for schedule in (ZERO_BUBBLE, INTERLEAVED, ZB_V)),
    *((variant, (2, 1, 2, 1), f"--zero-stage 1 {SEQUENCE_PARALLEL}") for variant in VARIANTS),
    *((variant, (1, 1, 2, 1), f"--zero-stage {stage}") for variant in VARIANTS for stage in (2, 3)),
]
QUICK_CASES = [("apertus", (2, 1, 1, 1), SEQUENCE_PARALLEL), ("phi3", (1, 1, 1, 2), "")]


def check_difference(diff: Difference) -> None:
    assert diff.loss <= 1e-12
    assert diff.gradient <= 1e-11, diff.worst_gradient
    assert diff.norm <= 1e-12


@pytest.mark.parametrize(
    ("variant", "grid", "options"),
    [pytest.param(*case, marks=() if case in QUICK_CASES else pytest.mark.slow) for case in CASES],
)
def test_every_layout_equals_single_process(variant: str, grid: tuple[int, int, int, int], options: str) -> None:
    *layout, context = grid
    check_difference(RUNS[variant].compare_layout(*layout, EXTRA, 3, options, context=context))


@pytest.mark.slow
@pytest.mark.parametrize("grid", [(2, 1, 1, 1), (1, 1, 1, 2), (2, 2, 1, 1)])
@pytest.mark.parametrize("variant", VARIANTS)
def test_dropout_equals_single_process(variant: str, grid: tuple[int, int, int, int]) -> None:
    *layout, context = grid
    dropout_flags = "--attention-dropout 0.1 --hidden-dropout 0.1 --layout-independent-dropout"
    check_difference(RUNS[variant].compare_layout(*layout, f"{EXTRA} {dropout_flags}", 3, RECOMPUTE, context=context))


EFFECTIVE_FLAGS = {
    "cohere2": ("--parallel-residual none", "--logit-scale 0.4", "--attention-temperature-floor 4", "--no-rope-freq 4"),
    "apertus": ("--activation silu", "--parallel-residual shared-norm", "--qk-norm none"),
    "phi3": (
        "--rotary-original-positions 1000",
        "--rotary-long-factors [2.5,3.0,4.5,7.0,9.5]",
        "--attention-temperature-scale 0.3",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variant", "flag"), [(variant, flag) for variant, flags in EFFECTIVE_FLAGS.items() for flag in flags]
)
def test_each_flag_changes_model(variant: str, flag: str) -> None:
    """Its smaller sibling is the comparison with formulas, tests/models/common/test_features.py."""
    RUNS[variant].check_flag_changes_loss(flag)
