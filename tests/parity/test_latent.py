"""Multi-latent attention in every layout: losses, gradients and norms of one process in fp64.

The grids are every combination of tensor, pipeline, context and expert parallelism of size 1 or 2 that the list has,
on 2 to 8 ranks, with and without sequence parallelism. The short run has four of them.
"""

from __future__ import annotations

from typing import NamedTuple

import pytest

from tests.helpers.layouts import check_fp64
from tests.parity.latent_runs import EXTRA, RUNS, VARIANTS
from tests.parity.test_schedules import DUAL_PIPE_V, INTERLEAVED, SCHEDULES, ZB_V, ZERO_BUBBLE

SEQUENCE_PARALLEL, RECOMPUTE, SELECTIVE = (
    "--sequence-parallel",
    "--checkpoint-activations",
    "--recompute-granularity selective",
)
A2A, MUON = "--cp-comm-type a2a", "--optimizer muon"


class Grid(NamedTuple):
    """Sizes of the axes; the expert ranks are among data x context."""

    tensor: int = 1
    pipe: int = 1
    data: int = 1
    context: int = 1
    expert: int = 1


OPTIONS_BY_GRID = {
    Grid(tensor=2): ("", SEQUENCE_PARALLEL, f"{SEQUENCE_PARALLEL} {RECOMPUTE}", SELECTIVE),
    Grid(pipe=2): ("", ZERO_BUBBLE, f"{INTERLEAVED} {RECOMPUTE}"),
    Grid(context=2): ("", A2A, RECOMPUTE, f"{SELECTIVE} {A2A}"),
    Grid(data=2, expert=2): ("", "--zero-stage 1"),
    Grid(tensor=2, pipe=2): ("", f"{SEQUENCE_PARALLEL} {ZERO_BUBBLE} {RECOMPUTE}"),
    Grid(tensor=2, context=2): (f"{SEQUENCE_PARALLEL} {A2A}", "", SEQUENCE_PARALLEL),
    Grid(tensor=2, data=2, expert=2): (f"{SEQUENCE_PARALLEL} --zero-stage 1",),
    Grid(pipe=2, context=2, expert=2): ("", "--zero-stage 1"),
    Grid(tensor=2, pipe=2, context=2, expert=2): ("", SEQUENCE_PARALLEL, f"{SEQUENCE_PARALLEL} --zero-stage 1"),
    Grid(tensor=2, pipe=2, data=2, expert=2): (f"{SEQUENCE_PARALLEL} --zero-stage 1 {INTERLEAVED}",),
    Grid(data=2): ("--zero-stage 2", f"--zero-stage 3 {RECOMPUTE}"),
    Grid(tensor=2, data=2): (f"--zero-stage 3 {SEQUENCE_PARALLEL}",),
}
"""Grid -> the options of its runs."""
CASES = [
    (variant, grid, options)
    for grid, option_sets in OPTIONS_BY_GRID.items()
    for options in option_sets
    for variant in VARIANTS
    if variant == "experts" or grid.expert == 1
]
QUICK_CASES = [
    ("dense", Grid(tensor=2), ""),
    ("experts", Grid(tensor=2, context=2), SEQUENCE_PARALLEL),
    ("experts", Grid(data=2, expert=2), "--zero-stage 1"),
    ("dense", Grid(tensor=2, pipe=2), f"{SEQUENCE_PARALLEL} {ZERO_BUBBLE} {RECOMPUTE}"),
]


def case_id(case: tuple[str, Grid, str]) -> str:
    """Return a short name of a case."""
    variant, grid, options = case
    sizes = "-".join(f"{name}{size}" for name, size in grid._asdict().items() if size > 1)
    return "-".join([variant, sizes, *options.replace("--", "").split()])


def check_grid(variant: str, grid: Grid, options: str, extra: str = EXTRA) -> None:
    """Compare the runs of a grid with one process."""
    if grid.expert > 1:
        options = f"{options} --expert-model-parallel-size {grid.expert}"
    sizes = (grid.tensor, grid.pipe, grid.data)
    check_fp64(RUNS[variant].compare_layout(*sizes, extra, 3, options, context=grid.context))


@pytest.mark.parametrize(
    ("variant", "grid", "options"),
    [pytest.param(*case, marks=() if case in QUICK_CASES else pytest.mark.slow, id=case_id(case)) for case in CASES],
)
def test_every_grid_equals_single_process(variant: str, grid: Grid, options: str) -> None:
    check_grid(variant, grid, options)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", [*SCHEDULES, ZB_V, DUAL_PIPE_V])
def test_every_schedule_equals_single_process(schedule: str) -> None:
    check_grid("dense", Grid(pipe=2), schedule)


@pytest.mark.slow
@pytest.mark.parametrize("options", ["", "--muon-split-qkv-heads"])
def test_muon_update_equals_single_process(options: str) -> None:
    check_grid("experts", Grid(tensor=2, data=2), SEQUENCE_PARALLEL, f"{EXTRA} {MUON} {options}")


@pytest.mark.slow
def test_dropout_equals_single_process() -> None:
    dropout = "--attention-dropout 0.1 --hidden-dropout 0.1 --layout-independent-dropout"
    check_grid("dense", Grid(tensor=2, context=2), SEQUENCE_PARALLEL, f"{EXTRA} {dropout}")


@pytest.mark.slow  # tests/models/common/test_features.py compares them with formulas
@pytest.mark.parametrize(
    ("variant", "flag"),
    [("experts", "--mscale 0.5"), ("experts", "--mscale-all-dim 0.2"), ("dense", "--latent-norm-epsilon 0.1")],
)
def test_each_flag_changes_model(variant: str, flag: str) -> None:
    RUNS[variant].check_flag_changes_loss(flag)
