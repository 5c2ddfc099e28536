"""T5 cut anywhere gives the loss, every gradient and the gradient norm of one process, however the pieces are run.

Masks of dropout are keyed by layer and micro-batch, so a pipeline draws those of one process.
"""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch

from tests.helpers.t5_layouts import Case, check_exact, cuts, run

MODELS = [Case(micro_batches=2), Case(enc_layers=2, dec_layers=4, has_segments=True, micro_batches=2)]
SWITCHES = [
    {"recompute_every": every, "dropout": dropout, "dtype": dtype}
    for every, dropout, dtype in product((0, 1, 2), (0.0, 0.1), (torch.float64, torch.bfloat16))
]
WAYS: list[dict[str, Any]] = [
    {"schedule": name, **switches} for name in ("1f1b", "gpipe", "zb-h1") for switches in SWITCHES
]
random.Random(0).shuffle(WAYS)  # neighbouring cuts meet ways that differ in all
CHUNKED = [{"schedule": name, "chunks": 2, **switches} for name in ("interleaved", "zb-h1") for switches in SWITCHES]


def rotated(stages: int, ways: list[dict[str, Any]], times: int = 1) -> list[Case]:
    """Return every cut of both models ``times`` times, each time with the way whose turn it is."""
    chunks = ways[0].get("chunks", 1)
    every = [replace(model, bounds=bounds) for model in MODELS for bounds in cuts(model, stages * chunks)]
    assert len(every) == 2 * {2: 10, 3: 45, 4: 120, 6: 252, 8: 120}[stages * chunks]
    return [replace(case, **ways[turn % len(ways)]) for turn, case in enumerate(every * times)]


def check(cases: list[Case], stages: int) -> None:
    for case, ranks in run(cases, pipe=stages):
        check_exact(case, ranks)


@pytest.mark.slow  # cuts in both stacks and at the seam: tests/parity/test_t5_layouts.py
@pytest.mark.parametrize(("stages", "step"), [(2, 13), (3, 37), (4, 79)])
def test_a_cut_may_fall_anywhere_with_any_schedule(stages: int, step: int) -> None:
    """Within the encoder, at the seam, within the decoder, around each norm; here a sample."""
    check(rotated(stages, WAYS)[1::step] + rotated(stages, CHUNKED)[7 :: 25 * step], stages)


@pytest.mark.slow
@pytest.mark.parametrize(("stages", "times"), [(2, 6), (3, 2), (4, 1)])
def test_every_cut_and_every_way_to_run_it(stages: int, times: int) -> None:
    cases = rotated(stages, WAYS, times)
    assert len(cases) >= 3 * len(WAYS)
    check(cases, stages)


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize(("stages", "step"), [(2, 1), (3, 5), (4, 5)])
def test_cuts_into_two_chunks_a_stage(stages: int, step: int) -> None:
    """Every cut into four pieces; every fifth into six and eight, so that each way to run them comes up."""
    check(rotated(stages, CHUNKED)[::step], stages)
