"""Sinks, output gates, layers without rotary positions and biased experts in every layout against one process.

The short run has one layout of each variant: sinks on context ranks, gates on tensor ranks, both with experts.
"""

from __future__ import annotations

import pytest

from megatron.training.parity import Difference
from tests.parity.extras_runs import EXTRA, RUNS, VARIANTS
from tests.parity.test_schedules import DUAL_PIPE_V, INTERLEAVED, SCHEDULES, ZB_V

RECOMPUTE, SELECTIVE, SEQUENCE_PARALLEL = (
    "--checkpoint-activations", "--recompute-granularity selective", "--sequence-parallel"
)  # fmt: skip
A2A, EP = "--cp-comm-type a2a", "--expert-model-parallel-size 2"
GRIDS = [
    (1, 1, 1, 2), (2, 1, 1, 1), (1, 2, 1, 1), (1, 1, 2, 1), (2, 1, 1, 2), (2, 2, 1, 1), (1, 2, 1, 2), (2, 1, 2, 1),
    (2, 2, 1, 2),
]  # fmt: skip
"""(tensor, pipe, data, context), of 2 to 8 ranks; a grid with several replicas or context ranks also has its experts
distributed over them."""


def make_cases() -> list[tuple[str, tuple[int, int, int, int], str]]:
    """Return (variant, grid, flags of the layout)."""
    cases = []
    for variant in VARIANTS:
        for grid in GRIDS:
            tensor, _, data, context = grid
            experts = ["", EP] if "--num-experts" in VARIANTS[variant] and data * context > 1 else [""]
            for flags in experts:
                cases += [(variant, grid, flags)]
                cases += [(variant, grid, f"{flags} {SEQUENCE_PARALLEL}".strip())] if tensor > 1 else []
    return cases


OPTION_CASES = [
    *((variant, (1, 1, 1, 2), A2A) for variant in VARIANTS),
    *((variant, (2, 1, 1, 1), f"{SEQUENCE_PARALLEL} {RECOMPUTE}") for variant in VARIANTS),
    *((variant, (1, 1, 1, 2), SELECTIVE) for variant in VARIANTS),
    *(("gpt_oss", (1, 2, 1, 1), schedule) for schedule in (*SCHEDULES, ZB_V)),
    *(("mimo", (1, 2, 1, 1), schedule) for schedule in (INTERLEAVED, ZB_V)),
    ("gpt_oss", (1, 2, 1, 1), f"{INTERLEAVED} {RECOMPUTE}"),
    *((variant, (2, 1, 2, 1), f"--zero-stage 1 {SEQUENCE_PARALLEL}") for variant in VARIANTS),
    *((variant, (1, 1, 2, 1), f"--zero-stage {stage}") for variant in VARIANTS for stage in (2, 3)),
    ("gpt_oss", (2, 1, 2, 1), f"{EP} {SEQUENCE_PARALLEL} --expert-tensor-parallel-size 1"),
]
CASES = [*make_cases(), *OPTION_CASES]
QUICK_CASES = [
    ("gpt_oss", (1, 1, 1, 2), EP),
    ("gpt_oss", (2, 1, 1, 1), SEQUENCE_PARALLEL),
    ("afmoe", (2, 1, 1, 1), ""),
    ("mimo", (2, 1, 1, 2), SEQUENCE_PARALLEL),
]


def check_difference(diff: Difference) -> None:
    assert diff.loss <= 1e-12
    assert diff.gradient <= 1e-11, diff.worst_gradient
    assert diff.norm <= 1e-12


@pytest.mark.parametrize(
    ("variant", "grid", "options"),
    [
        pytest.param(
            *case,
            id="-".join(map(str, (case[0], *case[1], case[2]))),
            marks=() if case in QUICK_CASES else pytest.mark.slow,
        )
        for case in CASES
    ],
)
def test_every_layout_equals_single_process(variant: str, grid: tuple[int, int, int, int], options: str) -> None:
    *layout, context = grid
    check_difference(RUNS[variant].compare_layout(*layout, EXTRA, 3, options, context=context))


MTP = "--mtp-num-layers 2 --mtp-loss-scaling-factor 0.5"
MTP_CASES = [
    *((variant, (1, 2, 1, 1), schedule) for variant in VARIANTS for schedule in (ZB_V, DUAL_PIPE_V)),
    *((variant, (2, 2, 1, 1), f"{ZB_V} {SEQUENCE_PARALLEL} {RECOMPUTE}") for variant in VARIANTS),
    *((variant, (1, 2, 1, 2), f"{ZB_V} {EP}") for variant in VARIANTS if "--num-experts" in VARIANTS[variant]),
    ("gpt_oss", (2, 1, 1, 2), f"{EP} {SEQUENCE_PARALLEL}"),
    *((variant, (1, 4, 1, 1), "") for variant in VARIANTS),  # one layer on each stage
]


@pytest.mark.slow  # LLaMA in a V placement is in the short run: tests/parity/test_mtp.py
@pytest.mark.parametrize(
    ("variant", "grid", "options"),
    [pytest.param(*case, id="-".join(map(str, (case[0], *case[1], case[2])))) for case in MTP_CASES],
)
def test_multi_token_prediction_equals_single_process(
    variant: str, grid: tuple[int, int, int, int], options: str
) -> None:
    """The layers of multi-token prediction have the sinks, gates and experts of the last layer.

    In a V placement, the first stage has these layers and the first ones of the decoder.
    """
    *layout, context = grid
    check_difference(RUNS[variant].compare_layout(*layout, f"{EXTRA} {MTP}", 3, options, context=context))


@pytest.mark.slow
@pytest.mark.parametrize("grid", [(2, 1, 1, 1), (1, 1, 1, 2), (2, 2, 1, 1)])
@pytest.mark.parametrize("variant", VARIANTS)
def test_dropout_equals_single_process(variant: str, grid: tuple[int, int, int, int]) -> None:
    """With attention dropout, masks and operators compute the softmax instead of tiles."""
    *layout, context = grid
    dropout_flags = "--attention-dropout 0.1 --hidden-dropout 0.1 --layout-independent-dropout"
    check_difference(RUNS[variant].compare_layout(*layout, f"{EXTRA} {dropout_flags}", 3, RECOMPUTE, context=context))


EFFECTIVE_FLAGS = {
    "gpt_oss": (
        "--softmax-type off-by-one", "--softmax-type vanilla", "--activation-func-clamp-value 0.2",
        "--glu-linear-offset 0.5", "--activation gated-silu",
    ),
    "afmoe": ("--no-rope-freq 4", "--no-rope-freq [1,0,0,0]"),
    "mimo": (
        "--sink-layers all", "--v-head-dim 10", "--window-num-query-groups 2", "--attention-value-scale 1",
        "--softmax-type off-by-one",
    ),
    "dense": ("--qk-norm-order before", "--qk-norm l2", "--softmax-type vanilla", "--no-rope-freq 4"),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variant", "flag"), [(variant, flag) for variant, flags in EFFECTIVE_FLAGS.items() for flag in flags]
)
def test_each_flag_changes_model(variant: str, flag: str) -> None:
    """Its smaller sibling is the comparison with formulas, tests/models/common/test_features.py."""
    RUNS[variant].check_flag_changes_loss(flag)
