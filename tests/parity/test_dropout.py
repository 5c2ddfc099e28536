"""``--layout-independent-dropout`` gives the loss, every gradient and the gradient norm of one process (row E12)."""

from __future__ import annotations

import pytest

from megatron.training.parity import compare
from tests.helpers import t5_runs
from tests.helpers.layouts import LAYOUTS, batches, check_fp64, difference, serial, traces

RATES = "--attention-dropout 0.1 --hidden-dropout 0.1"
DROPPED = f"--fp64 --clip-grad 0.5 {RATES} --layout-independent-dropout"


@pytest.mark.parametrize(
    ("tensor", "pipe", "data", "schedule"),
    [(2, 1, 2, ""), pytest.param(2, 2, 1, "--checkpoint-activations", marks=pytest.mark.slow)],
)
def test_gpt2_drops_what_one_process_drops(tensor: int, pipe: int, data: int, schedule: str) -> None:
    check_fp64(difference(tensor, pipe, data, 2, DROPPED, schedule, steps=3))


@pytest.mark.slow
@pytest.mark.parametrize(("tensor", "pipe", "data"), LAYOUTS)
def test_gpt2_drops_what_one_process_drops_in_every_layout(tensor: int, pipe: int, data: int) -> None:
    check_fp64(difference(tensor, pipe, data, 2, DROPPED, steps=20))


def test_t5_drops_what_one_process_drops() -> None:
    variant = f"{DROPPED} {t5_runs.VARIANTS['v1.1']}"
    check_fp64(t5_runs.RUNS.difference(2, 2, 1, variant, 2, "--pipeline-split-rank 1"))


@pytest.mark.slow
@pytest.mark.parametrize("variant", t5_runs.VARIANTS)
@pytest.mark.parametrize(("tensor", "pipe", "data"), LAYOUTS)
def test_t5_drops_what_one_process_drops_in_every_layout(tensor: int, pipe: int, data: int, variant: str) -> None:
    """The first of the variants for 20 steps, as E01 has it."""
    steps = 20 if variant == "t5" else 4
    check_fp64(t5_runs.RUNS.difference(tensor, pipe, data, f"{DROPPED} {t5_runs.VARIANTS[variant]}", steps))


@pytest.mark.slow
def test_micro_batches_may_be_cut_otherwise() -> None:
    check_fp64(compare(serial(8, 2, DROPPED, steps=3), [serial(2, 8, DROPPED, steps=3)]))


@pytest.mark.slow  # a growing batch without dropout: tests/parity/test_rampup.py
def test_a_growing_batch_drops_what_one_process_drops() -> None:
    """The micro-batches of a step, which grow, are part of a sample's number on the second replica."""
    check_fp64(difference(1, 1, 2, 4, f"{DROPPED} --rampup-batch-size 8 4 28", steps=5))


@pytest.mark.parametrize(
    "schedule",
    [
        "--pipeline-chunks 2 --checkpoint-activations",
        pytest.param("--pipeline-schedule zb-h1", marks=pytest.mark.slow),
        pytest.param("--pipeline-schedule gpipe", marks=pytest.mark.slow),
    ],
)
def test_schedules_and_recompute_change_no_mask(schedule: str) -> None:
    check_fp64(difference(1, 2, 1, 2, DROPPED, schedule, steps=3))


def test_the_fast_masks_depend_on_the_layout_and_these_on_the_step() -> None:
    """What the other tests compare would be nothing if no element were dropped, or the same ones in each step."""
    fast = f"--fp64 --clip-grad 0.5 {RATES}"
    assert compare(serial(*batches(1, 2), fast), traces(1, 1, 2, *batches(2, 2), fast)).first_loss > 1e-6
    still = f"{DROPPED} --lr 1e-12"
    trace, plain = (serial(*batches(1, 2), extra, steps=4) for extra in (still, "--fp64 --clip-grad 0.5 --lr 1e-12"))
    changes = [with_dropout - without for with_dropout, without in zip(trace.losses, plain.losses, strict=True)]
    assert len({round(change, 9) for change in changes}) == 4
