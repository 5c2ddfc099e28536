"""``pretrain_t5.py`` trains for many steps in every layout as in one process: Adam, clipping, spans, evaluation.

The short run compares steps in tests/parity/test_dropout.py, and gradients in tests/parity/test_t5_layouts.py.
"""

from __future__ import annotations

import pytest

from tests.helpers.layouts import LAYOUTS, check_fp64
from tests.helpers.t5_runs import RUNS, VARIANTS


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tensor", "pipe", "data", "variant", "schedule"),
    [
        (2, 2, 1, "v1.1", "--pipeline-split-rank 1"),
        (1, 2, 2, "ul2", "--pipeline-schedule zb-h1"),
        (1, 4, 1, "t5", "--partition-method uniform"),
        (1, 2, 1, "learned", "--pipeline-chunks 2"),
    ],
)
def test_steps_equal_single_process(tensor: int, pipe: int, data: int, variant: str, schedule: str) -> None:
    """Rows E01, E04, E06, E10, E16 and E17."""
    check_fp64(RUNS.compare_layout(tensor, pipe, data, f"--fp64 {VARIANTS[variant]}", 3, schedule))


@pytest.mark.slow  # GPT-2's are in the short run: tests/parity/test_schedules.py
def test_auto_schedule_equals_single_process() -> None:
    """The first four steps measure, with two schedules; another follows with the chosen one."""
    check_fp64(RUNS.compare_layout(1, 2, 1, "--fp64", 5, "--pipeline-schedule auto"))


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(("tensor", "pipe", "data"), LAYOUTS)
def test_20_steps_equal_single_process(tensor: int, pipe: int, data: int, variant: str) -> None:
    check_fp64(RUNS.compare_layout(tensor, pipe, data, f"--fp64 {VARIANTS[variant]}", 20))


@pytest.mark.slow
@pytest.mark.parametrize("split", [1, 2, 3])
def test_pipeline_split_rank_equals_single_process(split: int) -> None:
    check_fp64(RUNS.compare_layout(1, 4, 1, "--fp64 --enc-layers 3", 3, f"--pipeline-split-rank {split}"))


def test_evaluation_equals_single_process_and_keeps_training() -> None:
    """Row E20, with dropout."""
    extra = "--fp64 --attention-dropout 0.1 --hidden-dropout 0.1"
    reference = RUNS.trace_layout(1, 1, 1, extra, 3, eval_every=1)[0]
    plain, evaluated = RUNS.trace_layout(1, 2, 1, extra, 3), RUNS.trace_layout(1, 2, 1, extra, 3, eval_every=1)
    assert [trace.losses for trace in plain] == [trace.losses for trace in evaluated]
    for trace in evaluated:
        assert max(abs(a - b) for a, b in zip(trace.eval_losses, reference.eval_losses, strict=True)) <= 1e-12
        assert trace.eval_losses[0] != trace.eval_losses[-1] and trace.losses != trace.eval_losses
