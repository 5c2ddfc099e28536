"""What every decoder must hold in every layout. A family's test file imports these tests and names its ``RUNS``.

    from tests.parity.decoder_tests import *

The tests are then that file's, by its name; the fixture ``runs`` is its RUNS.
"""

from __future__ import annotations

from itertools import product

import pytest

from tests.helpers.layouts import LAYOUTS, check_fp64
from tests.helpers.parity_runs import ParityRuns
from tests.parity.test_layouts import assert_same_gradients
from tests.parity.test_schedules import GRIDS, SCHEDULES, UNTIED, ZB_V, check_same_bits
from tests.parity.test_zero import assert_same_bits

__all__ = [
    "test_fp64_equals_single_process_for_20_steps",
    "test_fp32_stays_within_measured_floor",
    "test_pipeline_equals_single_process_and_schedules_are_bitwise",
    "test_every_schedule_equals_single_process",
    "test_recompute_is_bitwise_equal",
    "test_dropout_equals_single_process",
    "test_bf16_stays_close_to_fp32_and_equal_across_replicas",
    "test_zero_1_is_bitwise_zero_0",
]

DROPOUT_RATES = "--attention-dropout 0.1 --hidden-dropout 0.1"
DROPOUT = f"--fp64 --clip-grad 0.5 {DROPOUT_RATES} --layout-independent-dropout"


@pytest.mark.slow
@pytest.mark.parametrize(("tensor", "pipe", "data"), LAYOUTS)
def test_fp64_equals_single_process_for_20_steps(runs: ParityRuns, tensor: int, pipe: int, data: int) -> None:
    check_fp64(runs.compare_layout(tensor, pipe, data, "--fp64 --clip-grad 0.5", 20))


@pytest.mark.slow
@pytest.mark.parametrize(("tensor", "pipe", "data"), LAYOUTS)
def test_fp32_stays_within_measured_floor(runs: ParityRuns, tensor: int, pipe: int, data: int) -> None:
    """Row E02."""
    runs.check_fp32(tensor, pipe, data)


@pytest.mark.slow  # GPT-2's are in the short run: tests/parity/test_schedules.py
@pytest.mark.parametrize(("pipe", "schedule"), list(product((2, 4), [*SCHEDULES, ZB_V])))
def test_pipeline_equals_single_process_and_schedules_are_bitwise(runs: ParityRuns, pipe: int, schedule: str) -> None:
    """Rows E03 and E10: fp32, untied, clipping off; documents are apart."""
    extra = f"--fp32 {UNTIED} --num-layers 8 {runs.document_flags}" if pipe == 4 else f"--fp32 {UNTIED}"
    default_traces, schedule_traces = (
        runs.trace_layout(1, pipe, 1, f"{extra} {schedule_flag}", 2, 4, 2) for schedule_flag in ("", schedule)
    )
    check_same_bits(default_traces, schedule_traces)
    check_same_bits(schedule_traces, [*runs.trace_layout(1, 1, 1, extra, 2, 4, 2), *schedule_traces])


@pytest.mark.slow
@pytest.mark.parametrize(("grid", "schedule"), list(product(GRIDS, [*SCHEDULES, ZB_V])))
def test_every_schedule_equals_single_process(runs: ParityRuns, grid: tuple[int, int, int], schedule: str) -> None:
    check_fp64(runs.compare_layout(*grid, f"--fp64 --num-layers 8 {runs.document_flags}", 3, schedule))


@pytest.mark.slow  # one rank of every family is in the short run: tests/models/common/test_recompute.py
@pytest.mark.parametrize(("tensor", "pipe", "num_layers"), [(2, 1, 1), (1, 1, 2), (1, 2, 1), (2, 2, 1)])
def test_recompute_is_bitwise_equal(runs: ParityRuns, tensor: int, pipe: int, num_layers: int) -> None:
    """Row E08, with the dropout masks drawn again in backward."""
    extra = f"--fp32 {DROPOUT_RATES} {runs.document_flags}"
    plain = runs.trace_layout(tensor, pipe, 1, extra, 2)
    recomputed = runs.trace_layout(
        tensor, pipe, 1, f"{extra} --checkpoint-activations --checkpoint-num-layers {num_layers}", 2
    )
    assert [t.losses for t in plain] == [t.losses for t in recomputed]
    for plain_trace, recomputed_trace in zip(plain, recomputed, strict=True):
        assert_same_gradients(plain_trace, recomputed_trace)


@pytest.mark.slow  # GPT-2's are in the short run: tests/parity/test_dropout.py
@pytest.mark.parametrize(
    ("tensor", "pipe", "data", "schedule"),
    [
        (2, 2, 1, "--checkpoint-activations"),
        *((*grid, "") for grid in LAYOUTS),
        (1, 2, 1, "--pipeline-schedule zb-h1"),
    ],
)
def test_dropout_equals_single_process(runs: ParityRuns, tensor: int, pipe: int, data: int, schedule: str) -> None:
    """Row E12."""
    extra = f"{DROPOUT} {runs.document_flags}"
    check_fp64(runs.compare_layout(tensor, pipe, data, extra, 3, schedule))
    undropped = runs.trace_layout(1, 1, 1, f"--fp64 --clip-grad 0.5 {runs.document_flags}", 1)[0]
    assert runs.trace_layout(1, 1, 1, extra, 3)[0].losses[0] != undropped.losses[0]


@pytest.mark.slow
def test_bf16_stays_close_to_fp32_and_equal_across_replicas(runs: ParityRuns) -> None:
    fp32_trace, bf16_traces = runs.trace_layout(1, 1, 1, "--fp32", 6)[0], runs.trace_layout(2, 2, 1, "--bf16", 6)
    assert abs(bf16_traces[0].losses[-1] - fp32_trace.losses[-1]) < 0.05
    assert len({tuple(t.losses) for t in bf16_traces}) == 1


@pytest.mark.slow
def test_zero_1_is_bitwise_zero_0(runs: ParityRuns) -> None:
    """Row E07."""
    for layout in ((1, 1, 2), (2, 1, 2)):
        assert_same_bits(
            *(
                runs.trace_layout(*layout, f"--fp32 --clip-grad 0.5 {zero_flags}", 6)
                for zero_flags in ("", "--zero-stage 1")
            )
        )
