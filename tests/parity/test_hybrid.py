"""Hybrid decoders in every layout: losses, gradients and norms of one process in fp64.

The grids are combinations of tensor, pipeline, context, data and expert parallelism on 2 to 8 ranks, with and without
sequence parallelism. Documents start anywhere and span context ranks. The short run has one grid for each mixer.
"""

from __future__ import annotations

import pytest

from tests.helpers.layouts import check_fp64
from tests.parity.hybrid_runs import EXTRA, RUNS, VARIANTS
from tests.parity.test_latent import A2A, MUON, RECOMPUTE, SELECTIVE, SEQUENCE_PARALLEL, Grid, case_id
from tests.parity.test_schedules import DUAL_PIPE_V, INTERLEAVED, SCHEDULES, ZB_V, ZERO_BUBBLE

OPTIONS_BY_GRID = {
    Grid(tensor=2): ("", f"{SEQUENCE_PARALLEL} {RECOMPUTE}", SELECTIVE),
    Grid(pipe=2): ("", f"{ZERO_BUBBLE} {RECOMPUTE}"),
    Grid(context=2): ("", f"{SELECTIVE} {A2A}", RECOMPUTE),
    Grid(context=4): ("",),
    Grid(data=2): ("--zero-stage 1", "--zero-stage 2", f"--zero-stage 3 {RECOMPUTE}"),
    Grid(tensor=2, context=2): (SEQUENCE_PARALLEL, ""),
    Grid(tensor=2, pipe=2): (f"{SEQUENCE_PARALLEL} {INTERLEAVED}",),
    Grid(tensor=2, data=2): (f"--zero-stage 3 {SEQUENCE_PARALLEL}",),
    Grid(data=2, expert=2): ("--zero-stage 1",),
    Grid(tensor=4): ("", SEQUENCE_PARALLEL),
    Grid(tensor=2, pipe=2, context=2): (f"{SEQUENCE_PARALLEL} --zero-stage 1",),
    Grid(pipe=2, context=2, expert=2): ("--zero-stage 1",),
}
"""Grid -> the options of its runs."""
QUICK_CASES = [
    ("mixed", Grid(tensor=2, context=2), SEQUENCE_PARALLEL),
    ("kimi_linear", Grid(context=2), f"{SELECTIVE} {A2A}"),
    ("nemotron_h", Grid(pipe=2), f"{ZERO_BUBBLE} {RECOMPUTE}"),
    ("falcon_h1", Grid(tensor=2), f"{SEQUENCE_PARALLEL} {RECOMPUTE}"),
]
CASES = [
    (variant, grid, options)
    for case_idx, (grid, options) in enumerate(
        (grid, options) for grid, option_sets in OPTIONS_BY_GRID.items() for options in option_sets
    )
    for variant_idx, variant in enumerate(VARIANTS)
    if (case_idx + variant_idx) % 2 == 0 or (variant, grid, options) in QUICK_CASES
    if grid.expert == 1 or "--num-experts" in VARIANTS[variant]
]
"""Each grid with half of the models, in turn."""


def check_grid(variant: str, grid: Grid, options: str, extra: str = EXTRA) -> None:
    """Compare the runs of a grid with one process."""
    if grid.expert > 1:
        options = f"{options} --expert-model-parallel-size {grid.expert}"
    sizes = (grid.tensor, grid.pipe, grid.data)
    check_fp64(RUNS[variant].compare_layout(*sizes, extra, 3, options, context=grid.context), max_norm=1e-11)


@pytest.mark.parametrize(
    ("variant", "grid", "options"),
    [pytest.param(*case, marks=() if case in QUICK_CASES else pytest.mark.slow, id=case_id(case)) for case in CASES],
)
def test_every_grid_equals_single_process(variant: str, grid: Grid, options: str) -> None:
    check_grid(variant, grid, options)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", [*SCHEDULES, ZB_V, DUAL_PIPE_V])
def test_every_schedule_equals_single_process(schedule: str) -> None:
    check_grid("nemotron_h", Grid(pipe=2), schedule)


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_several_chunks_of_the_recurrence_equal_single_process(variant: str) -> None:
    """160 tokens are three chunks of the recurrence; the 40 tokens of a context rank's chunk are less than one."""
    extra = f"{EXTRA} --seq-length 160 --max-position-embeddings 160"
    check_grid(variant, Grid(tensor=2, context=2), SEQUENCE_PARALLEL, extra)


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["mixed", "nemotron_h"])
def test_muon_update_equals_single_process(variant: str) -> None:
    check_grid(variant, Grid(tensor=2, data=2), SEQUENCE_PARALLEL, f"{EXTRA} {MUON}")


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["mixed", "falcon_h1"])
def test_dropout_equals_single_process(variant: str) -> None:
    dropout = "--attention-dropout 0.1 --hidden-dropout 0.1 --layout-independent-dropout"
    check_grid(variant, Grid(tensor=2, context=2), SEQUENCE_PARALLEL, f"{EXTRA} {dropout}")


@pytest.mark.slow
def test_pipeline_bounds_of_a_pattern_equal_single_process() -> None:
    extra = f"{EXTRA} --hybrid-layer-pattern M|-*|EM|-"
    check_grid("nemotron_h", Grid(pipe=2), "", extra)


@pytest.mark.slow
def test_documents_change_the_losses_of_recurrent_layers() -> None:
    """A comparison of layouts cannot detect states that cross documents in all of them."""
    for variant in VARIANTS:
        RUNS[variant].check_flag_changes_loss("--reset-attention-mask")
