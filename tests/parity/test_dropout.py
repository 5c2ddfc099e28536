"""``--layout-independent-dropout`` gives the loss, every gradient and the gradient norm of one process (row E12)."""

from __future__ import annotations

import pytest

from megatron.training.parity import compare
from tests.helpers import t5_runs
from tests.helpers.layouts import (
    LAYOUTS,
    check_fp64,
    compare_layout,
    split_global_batch,
    trace_layout,
    trace_one_process,
)

DROPOUT_RATES = "--attention-dropout 0.1 --hidden-dropout 0.1"
DROPOUT = f"--fp64 --clip-grad 0.5 {DROPOUT_RATES} --layout-independent-dropout"


@pytest.mark.parametrize(
    ("tensor", "pipe", "data", "schedule"),
    [(2, 1, 2, ""), pytest.param(2, 2, 1, "--checkpoint-activations", marks=pytest.mark.slow)],
)
def test_gpt2_dropout_equals_single_process(tensor: int, pipe: int, data: int, schedule: str) -> None:
    check_fp64(compare_layout(tensor, pipe, data, 2, DROPOUT, schedule, steps=3))


@pytest.mark.slow
@pytest.mark.parametrize(("tensor", "pipe", "data"), LAYOUTS)
def test_gpt2_dropout_equals_single_process_in_every_layout(tensor: int, pipe: int, data: int) -> None:
    check_fp64(compare_layout(tensor, pipe, data, 2, DROPOUT, steps=20))


def test_t5_dropout_equals_single_process() -> None:
    variant = f"{DROPOUT} {t5_runs.VARIANTS['v1.1']}"
    check_fp64(t5_runs.RUNS.compare_layout(2, 2, 1, variant, 2, "--pipeline-split-rank 1"))


@pytest.mark.slow
@pytest.mark.parametrize("variant", t5_runs.VARIANTS)
@pytest.mark.parametrize(("tensor", "pipe", "data"), LAYOUTS)
def test_t5_dropout_equals_single_process_in_every_layout(tensor: int, pipe: int, data: int, variant: str) -> None:
    """The first of the variants for 20 steps, as E01 has it."""
    steps = 20 if variant == "t5" else 4
    check_fp64(t5_runs.RUNS.compare_layout(tensor, pipe, data, f"{DROPOUT} {t5_runs.VARIANTS[variant]}", steps))


@pytest.mark.slow
def test_micro_batch_size_does_not_change_dropout() -> None:
    check_fp64(compare(trace_one_process(8, 2, DROPOUT, steps=3), [trace_one_process(2, 8, DROPOUT, steps=3)]))


@pytest.mark.slow  # a growing batch without dropout: tests/parity/test_rampup.py
def test_growing_batch_dropout_equals_single_process() -> None:
    """The micro-batches of a step, which grow, are part of a sample's number on the second replica."""
    check_fp64(compare_layout(1, 1, 2, 4, f"{DROPOUT} --rampup-batch-size 8 4 28", steps=5))


@pytest.mark.parametrize(
    "schedule",
    [
        "--pipeline-chunks 2 --checkpoint-activations",
        pytest.param("--pipeline-schedule zb-h1", marks=pytest.mark.slow),
        pytest.param("--pipeline-schedule gpipe", marks=pytest.mark.slow),
    ],
)
def test_schedules_and_recompute_keep_dropout_masks(schedule: str) -> None:
    check_fp64(compare_layout(1, 2, 1, 2, DROPOUT, schedule, steps=3))


def test_fast_masks_depend_on_layout_and_masks_change_per_step() -> None:
    """What the other tests compare would be nothing if no element were dropped, or the same ones in each step."""
    fast_flags = f"--fp64 --clip-grad 0.5 {DROPOUT_RATES}"
    assert (
        compare(
            trace_one_process(*split_global_batch(1, 2), fast_flags),
            trace_layout(1, 1, 2, *split_global_batch(2, 2), fast_flags),
        ).first_loss
        > 1e-6
    )
    frozen_flags = f"{DROPOUT} --lr 1e-12"
    trace, plain = (
        trace_one_process(*split_global_batch(1, 2), extra, steps=4)
        for extra in (frozen_flags, "--fp64 --clip-grad 0.5 --lr 1e-12")
    )
    changes = [dropout_loss - plain_loss for dropout_loss, plain_loss in zip(trace.losses, plain.losses, strict=True)]
    assert len({round(change, 9) for change in changes}) == 4
