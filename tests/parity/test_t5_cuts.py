"""T5 cut anywhere gives the loss, every gradient and the gradient norm of one process, with every schedule.

Masks of dropout are keyed by layer and micro-batch, so a pipeline draws those of one process.
"""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch

from tests.helpers.t5_layouts import Case, all_stage_bounds, check_equal, run_cases

MODELS = [Case(num_micro_batches=2), Case(enc_layers=2, dec_layers=4, has_segments=True, num_micro_batches=2)]
OPTIONS = [
    {"recompute_every": recompute_every, "dropout": dropout, "dtype": dtype}
    for recompute_every, dropout, dtype in product((0, 1, 2), (0.0, 0.1), (torch.float64, torch.bfloat16))
]
RUNS: list[dict[str, Any]] = [
    {"schedule": name, **options} for name in ("1f1b", "gpipe", "zb-h1") for options in OPTIONS
]
random.Random(0).shuffle(RUNS)  # neighbouring cuts meet ways that differ in all
CHUNKED = [{"schedule": name, "num_chunks": 2, **options} for name in ("interleaved", "zb-h1") for options in OPTIONS]


def rotate_cases(stages: int, runs: list[dict[str, Any]], times: int = 1) -> list[Case]:
    """Return every cut of both models ``times`` times, each time with the way whose turn it is."""
    chunks = runs[0].get("num_chunks", 1)
    cases = [replace(model, bounds=bounds) for model in MODELS for bounds in all_stage_bounds(model, stages * chunks)]
    assert len(cases) == 2 * {2: 10, 3: 45, 4: 120, 6: 252, 8: 120}[stages * chunks]
    return [replace(case, **runs[turn % len(runs)]) for turn, case in enumerate(cases * times)]


def check_cases(cases: list[Case], stages: int) -> None:
    for case, ranks in run_cases(cases, pipe=stages):
        check_equal(case, ranks)


@pytest.mark.slow  # cuts in both stacks and at the seam: tests/parity/test_t5_layouts.py
@pytest.mark.parametrize(("stages", "step"), [(2, 13), (3, 37), (4, 79)])
def test_any_partition_works_with_any_schedule(stages: int, step: int) -> None:
    """Within the encoder, at the seam, within the decoder, around each norm; here a sample."""
    check_cases(rotate_cases(stages, RUNS)[1::step] + rotate_cases(stages, CHUNKED)[7 :: 25 * step], stages)


@pytest.mark.slow
@pytest.mark.parametrize(("stages", "times"), [(2, 6), (3, 2), (4, 1)])
def test_every_partition_with_every_schedule_and_option(stages: int, times: int) -> None:
    cases = rotate_cases(stages, RUNS, times)
    assert len(cases) >= 3 * len(RUNS)
    check_cases(cases, stages)


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize(("stages", "step"), [(2, 1), (3, 5), (4, 5)])
def test_partitions_into_two_chunks_per_stage(stages: int, step: int) -> None:
    """Every cut into four virtual stages; every fifth into six and eight, so that each way to run them comes up."""
    check_cases(rotate_cases(stages, CHUNKED)[::step], stages)
