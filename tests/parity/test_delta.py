"""Hybrid decoders with the delta rule in every layout: losses, gradients and norms of one process in fp64."""

from __future__ import annotations

import pytest

from tests.helpers.layouts import check_fp64
from tests.parity.delta_runs import EXTRA, RUNS, VARIANTS
from tests.parity.test_schedules import INTERLEAVED, SCHEDULES, ZB_V, ZERO_BUBBLE

SEQUENCE_PARALLEL, RECOMPUTE, SELECTIVE = (
    "--sequence-parallel", "--checkpoint-activations", "--recompute-granularity selective"
)  # fmt: skip
EP, A2A, MUON = "--expert-model-parallel-size 2", "--cp-comm-type a2a", "--optimizer muon"
Grid = tuple[int, int, int, int]
OPTIONS_BY_GRID: dict[Grid, tuple[str, ...]] = {
    (2, 1, 1, 1): ("", SEQUENCE_PARALLEL, f"{SEQUENCE_PARALLEL} {RECOMPUTE}", SELECTIVE),
    (1, 2, 1, 1): ("", ZERO_BUBBLE, f"{INTERLEAVED} {RECOMPUTE}"),
    (1, 1, 1, 2): ("", RECOMPUTE, SELECTIVE, A2A),
    (1, 1, 1, 4): ("",),
    (1, 1, 2, 1): ("", "--zero-stage 1", "--zero-stage 2", f"--zero-stage 3 {RECOMPUTE}"),
    (2, 2, 1, 1): (f"{SEQUENCE_PARALLEL} {ZERO_BUBBLE} {RECOMPUTE}",),
    (2, 1, 1, 2): (SEQUENCE_PARALLEL, ""),
    (1, 2, 1, 2): ("", "--zero-stage 1"),
    (2, 1, 2, 1): (f"--zero-stage 3 {SEQUENCE_PARALLEL}", f"--zero-stage 1 {SEQUENCE_PARALLEL}"),
    (2, 2, 1, 2): (SEQUENCE_PARALLEL,),
    (1, 1, 2, 4): (f"--zero-stage 1 {SELECTIVE}",),
}
"""Sizes of the tensor, pipeline, data and context groups -> the options of the runs."""
QUICK_CASES = [
    ("ling", (2, 1, 1, 1), SEQUENCE_PARALLEL),
    ("olmo_hybrid", (1, 1, 1, 4), ""),
]
CASES = [
    (variant, grid, options)
    for case_idx, (grid, options) in enumerate(
        (grid, options) for grid, option_sets in OPTIONS_BY_GRID.items() for options in option_sets
    )
    for variant_idx, variant in enumerate(VARIANTS)
    if (case_idx + variant_idx) % 3 == 0 or (variant, grid, options) in QUICK_CASES
]
"""Each grid with one or two of the models, in turn."""


def check_grid(variant: str, grid: Grid, options: str, extra: str = EXTRA) -> None:
    """Compare the runs of a grid with one process."""
    *layout, context = grid
    check_fp64(RUNS[variant].compare_layout(*layout, extra, 3, options, context=context))


@pytest.mark.parametrize(
    ("variant", "grid", "options"),
    [pytest.param(*case, marks=() if case in QUICK_CASES else pytest.mark.slow) for case in CASES],
)
def test_every_layout_equals_single_process(variant: str, grid: Grid, options: str) -> None:
    check_grid(variant, grid, options)


@pytest.mark.slow
@pytest.mark.parametrize("grid", [(1, 1, 2, 1), (2, 1, 1, 2)])
def test_distributed_experts_equal_single_process(grid: Grid) -> None:
    check_grid("qwen3_next", grid, EP)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", [*SCHEDULES, ZB_V])
def test_every_schedule_equals_single_process(schedule: str) -> None:
    check_grid("kimi_linear", (1, 2, 1, 1), schedule)


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["qwen3_next", "ling"])
def test_several_chunks_of_the_recurrence_equal_single_process(variant: str) -> None:
    """A chunk of a context rank has 80 tokens: the recurrence processes 64 of them at a time."""
    check_grid(variant, (1, 1, 1, 2), "", f"{EXTRA} --seq-length 320 --max-position-embeddings 320")


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["olmo_hybrid", "kimi_linear"])
def test_muon_update_equals_single_process(variant: str) -> None:
    check_grid(variant, (2, 1, 2, 1), SEQUENCE_PARALLEL, f"{EXTRA} {MUON} --muon-split-qkv-heads")


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["qwen3_next", "kimi_linear"])
def test_dropout_equals_single_process(variant: str) -> None:
    dropout = "--attention-dropout 0.1 --hidden-dropout 0.1 --layout-independent-dropout"
    check_grid(variant, (2, 1, 1, 2), SEQUENCE_PARALLEL, f"{EXTRA} {dropout}")


@pytest.mark.slow
@pytest.mark.parametrize(("grid", "options"), [((2, 1, 1, 2), SEQUENCE_PARALLEL), ((1, 2, 1, 1), ZB_V)])
def test_multi_token_prediction_equals_single_process(grid: Grid, options: str) -> None:
    check_grid("qwen3_next", grid, options, f"{EXTRA} --mtp-num-layers 1")


@pytest.mark.slow  # tests/models/common/test_delta_against_huggingface.py compares them with transformers
@pytest.mark.parametrize(
    ("variant", "flag"),
    [
        ("olmo_hybrid", "--linear-norm-epsilon 0.1"),
        ("qwen3_next", "--linear-allow-neg-eigval"),
        ("kimi_linear", "--linear-full-rank-gates"),
        ("ling", "--linear-decay-limit 1"),
    ],
)
def test_each_flag_changes_model(variant: str, flag: str) -> None:
    RUNS[variant].check_flag_changes_loss(flag)
