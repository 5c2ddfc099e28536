"""What every decoder must hold in every layout. A family's test file imports these tests and names its ``RUNS``.

    from tests.parity.decoder_tests import *

The tests are then that file's, by its name; the fixture ``runs`` is its RUNS.
"""

from __future__ import annotations

from itertools import product

import pytest

from tests.helpers.layouts import LAYOUTS, check_fp64
from tests.helpers.parity_runs import Runs
from tests.parity.test_layouts import assert_same_gradients
from tests.parity.test_schedules import GRIDS, OTHERS, UNTIED, ZB_V, check_same_bits
from tests.parity.test_zero import assert_same_bits

__all__ = [
    "test_fp64_equals_one_process_for_20_steps",
    "test_fp32_is_at_the_floor",
    "test_a_pipeline_is_one_process_and_its_schedules_each_other_to_the_bit",
    "test_every_schedule_trains_the_model_of_one_process",
    "test_recompute_changes_no_bit",
    "test_dropout_is_that_of_one_process",
    "test_bf16_trains_close_to_fp32_and_equal_in_every_replica",
    "test_replicas_that_share_train_the_model_of_those_that_do_not",
]

RATES = "--attention-dropout 0.1 --hidden-dropout 0.1"
DROPPED = f"--fp64 --clip-grad 0.5 {RATES} --layout-independent-dropout"


@pytest.mark.slow
@pytest.mark.parametrize(("tensor", "pipe", "data"), LAYOUTS)
def test_fp64_equals_one_process_for_20_steps(runs: Runs, tensor: int, pipe: int, data: int) -> None:
    check_fp64(runs.difference(tensor, pipe, data, "--fp64 --clip-grad 0.5", 20))


@pytest.mark.slow
@pytest.mark.parametrize(("tensor", "pipe", "data"), LAYOUTS)
def test_fp32_is_at_the_floor(runs: Runs, tensor: int, pipe: int, data: int) -> None:
    """Row E02."""
    runs.check_floor(tensor, pipe, data)


@pytest.mark.slow  # GPT-2's are in the short run: tests/parity/test_schedules.py
@pytest.mark.parametrize(("pipe", "schedule"), list(product((2, 4), [*OTHERS, ZB_V])))
def test_a_pipeline_is_one_process_and_its_schedules_each_other_to_the_bit(
    runs: Runs, pipe: int, schedule: str
) -> None:
    """Rows E03 and E10: fp32, untied, clipping off; documents are apart."""
    extra = f"--fp32 {UNTIED} --num-layers 8 {runs.documents}" if pipe == 4 else f"--fp32 {UNTIED}"
    one, other = (runs.traces(1, pipe, 1, f"{extra} {each}", 2, 4, 2) for each in ("", schedule))
    check_same_bits(one, other)
    check_same_bits(other, [*runs.traces(1, 1, 1, extra, 2, 4, 2), *other])


@pytest.mark.slow
@pytest.mark.parametrize(("grid", "schedule"), list(product(GRIDS, [*OTHERS, ZB_V])))
def test_every_schedule_trains_the_model_of_one_process(runs: Runs, grid: tuple[int, int, int], schedule: str) -> None:
    check_fp64(runs.difference(*grid, f"--fp64 --num-layers 8 {runs.documents}", 3, schedule))


@pytest.mark.slow  # one rank of every family is in the short run: tests/models/common/test_recompute.py
@pytest.mark.parametrize(("tensor", "pipe", "every"), [(2, 1, 1), (1, 1, 2), (1, 2, 1), (2, 2, 1)])
def test_recompute_changes_no_bit(runs: Runs, tensor: int, pipe: int, every: int) -> None:
    """Row E08, with the dropout masks drawn again in backward."""
    extra = f"--fp32 {RATES} {runs.documents}"
    plain = runs.traces(tensor, pipe, 1, extra, 2)
    recomputed = runs.traces(tensor, pipe, 1, f"{extra} --checkpoint-activations --checkpoint-num-layers {every}", 2)
    assert [t.losses for t in plain] == [t.losses for t in recomputed]
    for one, other in zip(plain, recomputed, strict=True):
        assert_same_gradients(one, other)


@pytest.mark.slow  # GPT-2's are in the short run: tests/parity/test_dropout.py
@pytest.mark.parametrize(
    ("tensor", "pipe", "data", "schedule"),
    [
        (2, 2, 1, "--checkpoint-activations"),
        *((*grid, "") for grid in LAYOUTS),
        (1, 2, 1, "--pipeline-schedule zb-h1"),
    ],
)
def test_dropout_is_that_of_one_process(runs: Runs, tensor: int, pipe: int, data: int, schedule: str) -> None:
    """Row E12."""
    extra = f"{DROPPED} {runs.documents}"
    check_fp64(runs.difference(tensor, pipe, data, extra, 3, schedule))
    without = runs.traces(1, 1, 1, f"--fp64 --clip-grad 0.5 {runs.documents}", 1)[0]
    assert runs.traces(1, 1, 1, extra, 3)[0].losses[0] != without.losses[0]


@pytest.mark.slow
def test_bf16_trains_close_to_fp32_and_equal_in_every_replica(runs: Runs) -> None:
    wide, narrow = runs.traces(1, 1, 1, "--fp32", 6)[0], runs.traces(2, 2, 1, "--bf16", 6)
    assert abs(narrow[0].losses[-1] - wide.losses[-1]) < 0.05
    assert len({tuple(t.losses) for t in narrow}) == 1


@pytest.mark.slow
def test_replicas_that_share_train_the_model_of_those_that_do_not(runs: Runs) -> None:
    """Row E07."""
    for layout in ((1, 1, 2), (2, 1, 2)):
        assert_same_bits(
            *(runs.traces(*layout, f"--fp32 --clip-grad 0.5 {zero}", 6) for zero in ("", "--zero-stage 1"))
        )
