"""T5 in every layout and cut anywhere gives the loss, every gradient and the gradient norm of one process."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.helpers.layouts import LAYOUTS
from tests.helpers.t5_layouts import (
    GATED,
    LEARNED,
    UNTIED,
    Case,
    check_bf16,
    check_fp64,
    compare_with_one_process,
    run_cases,
)

VARIANTS = [
    Case(),
    Case(overrides=GATED, has_segments=True, recompute_every=1),
    Case(enc_layers=2, dec_layers=4, overrides=LEARNED, lengths=(6, 13)),
]
EXACT_CASE = replace(Case(), overrides=(*LEARNED, *UNTIED), dtype=torch.float32)
"""Where nothing is tied but the tables of words and positions, between the two embeddings."""
TIED_WEIGHTS = ("embedding.word.weight", "embedding.position.weight")
SCHEDULES = [
    {"schedule": "gpipe"},
    {"schedule": "zb-h1"},
    {"schedule": "interleaved", "num_chunks": 2},
    {"schedule": "zb-h1", "num_chunks": 2},
    {"schedule": "zb-v", "num_chunks": 2},
    {"schedule": "dualpipev", "num_chunks": 2},
]


QUICK_LAYOUTS = [(2, 1, 2)]
"""What always runs; tests/parity/test_t5_steps.py and tests/model have the others."""


@pytest.mark.parametrize(
    ("tensor", "pipe", "data"),
    [pytest.param(*grid, marks=() if grid in QUICK_LAYOUTS else pytest.mark.slow) for grid in LAYOUTS],
)
def test_every_layout_equals_single_process(tensor: int, pipe: int, data: int) -> None:
    for case, ranks in run_cases(VARIANTS, tensor, pipe, data):
        check_fp64(case, ranks)


def test_more_stages_than_layers_per_stack_equal_single_process() -> None:
    small_case = Case(enc_layers=1, dec_layers=1, num_micro_batches=2)
    cases = [replace(small_case, bounds=bounds) for bounds in ((0, 1, 2, 4, 7), (0, 2, 5, 6, 7), (0, 3, 4, 5, 7))]
    cases.append(replace(small_case, enc_layers=2, bounds=(0, 1, 2, 3, 8)))
    for case, ranks in run_cases(cases, pipe=4):
        check_fp64(case, ranks)


def test_recompute_schedules_and_partition_methods_equal_single_process(pytestconfig: pytest.Config) -> None:
    cases = [
        Case(overrides=GATED, recompute_every=1, schedule="zb-h1"),
        Case(overrides=LEARNED, has_segments=True, lengths=(9, 9), num_chunks=3, schedule="interleaved"),
        Case(has_segments=True, recompute_every=1, schedule="zb-v", num_chunks=2),
        Case(bounds="parameters"),
    ]
    if pytestconfig.getoption("--all"):
        cases += [
            Case(has_segments=True, recompute_every=2, **SCHEDULES[2]),
            Case(bounds="profile"),
            Case(bounds="type:LayerPipe"),
        ]
    for case, ranks in run_cases(cases, pipe=2):
        check_fp64(case, ranks)


@pytest.mark.slow
@pytest.mark.parametrize(("tensor", "pipe", "data"), [grid for grid in LAYOUTS if grid[1] > 1])
def test_every_schedule_with_every_option_equals_single_process(tensor: int, pipe: int, data: int) -> None:
    cases = [
        replace(case, recompute_every=recompute_every, **schedule)
        for case in (*VARIANTS, replace(VARIANTS[2], has_segments=True))
        for schedule in SCHEDULES
        for recompute_every in (0, 2)
    ]
    for case, ranks in run_cases(cases, tensor, pipe, data):
        check_fp64(case, ranks)


def test_untied_fp32_pipeline_is_bitwise_except_shared_tables(pytestconfig: pytest.Config) -> None:
    """Rows E03 and E04, with the cut in the encoder, at the seam, and in the decoder, and all schedules (E10)."""
    is_full_run = pytestconfig.getoption("--all")
    cases = [
        replace(EXACT_CASE, bounds=bounds) for bounds in ((0, 2, 11), (0, 5, 11), (0, 8, 11))[0 if is_full_run else 1 :]
    ]
    cases += [replace(EXACT_CASE, has_segments=True, recompute_every=1)]
    cases += [replace(EXACT_CASE, **schedule) for schedule in (SCHEDULES if is_full_run else SCHEDULES[::3])]
    for case, ranks in run_cases(cases, pipe=2):
        diffs = compare_with_one_process(case, ranks)
        assert max(diffs.pop(name) for name in TIED_WEIGHTS) <= 3e-7
        assert diffs.pop("norm") <= 1e-7
        assert set(diffs.values()) == {0.0}, (case, diffs)


def test_dropout_masks_equal_single_process_with_recompute() -> None:
    """Rows E08 and E12."""
    dropout_case = replace(EXACT_CASE, dropout=0.1)
    cases = [dropout_case, replace(dropout_case, bounds=(0, 8, 11), recompute_every=2)]
    cases += [replace(dropout_case, schedule="zb-h1", recompute_every=1)]
    for case, ranks in run_cases(cases, pipe=2):
        diffs = compare_with_one_process(case, ranks)
        assert max(diffs.pop(name, 0.0) for name in TIED_WEIGHTS) <= 3e-7
        assert diffs.pop("norm") <= 1e-7
        assert max(diffs.values()) <= (0.0 if case.overrides else 1e-11), (case, diffs)
    with pytest.raises(AssertionError):
        check_fp64(replace(dropout_case, dropout=0.0), ranks)


@pytest.mark.slow  # the short run compares losses in bf16: tests/parity/test_t5_precision.py
@pytest.mark.parametrize(("tensor", "pipe", "data"), LAYOUTS)
def test_bf16_gradients_stay_close_to_fp32(tensor: int, pipe: int, data: int) -> None:
    """The relative difference of the gradient that differs most; observed 0.15, 0.19 and 0.07."""
    cases = [replace(case, dtype=torch.bfloat16) for case in VARIANTS]
    for tolerance, (case, ranks) in zip((0.3, 0.35, 0.12), run_cases(cases, tensor, pipe, data), strict=True):
        if tensor * data == 1:
            check_bf16(case, ranks)
        diffs = compare_with_one_process(replace(case, dtype=torch.float32), ranks)
        worst = max((value, name) for name, value in diffs.items() if name not in ("loss", "norm"))
        print(
            f"tensor {tensor} pipe {pipe} data {data}: {worst[0]:.3f} of {tolerance} ({worst[1]}), {diffs['loss']:.1e}"
        )
        assert worst[0] <= tolerance, worst
        assert diffs["loss"] <= 0.01  # observed 0.004
        assert diffs["norm"] <= 0.05  # observed 0.027
        assert len({loss for loss, _, _ in ranks}) == 1
