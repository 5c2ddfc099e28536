"""Schedules are complete, in order, free from deadlock, and hold what the table says."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tds.schedule import (
    Backward,
    Forward,
    ScheduleError,
    forward_only,
    gpipe,
    one_forward_one_backward,
    schedule_named,
    validate,
)

STAGES = st.integers(1, 64)
MICRO_BATCHES = st.integers(1, 256)
QUICK = settings(max_examples=12, deadline=None)


def _all(order, p: int, m: int) -> list:
    return [order(p, m, stage) for stage in range(p)]


@QUICK
@given(STAGES, MICRO_BATCHES)
def test_1f1b_runs_and_holds_at_most_p_minus_stage(p: int, m: int) -> None:
    peaks = validate(_all(one_forward_one_backward, p, m), m, window=p + 1)
    assert peaks == [min(p - stage, m) for stage in range(p)]


@QUICK
@given(STAGES, MICRO_BATCHES)
def test_gpipe_runs_and_holds_all(p: int, m: int) -> None:
    assert validate(_all(gpipe, p, m), m, window=p + 1) == [m] * p


@QUICK
@given(STAGES, MICRO_BATCHES)
def test_forward_only_runs(p: int, m: int) -> None:
    validate(_all(forward_only, p, m), m, is_training=False, window=p + 1)


def test_every_small_case_runs() -> None:
    for p in range(1, 9):
        for m in range(1, 17):
            for order in (gpipe, one_forward_one_backward):
                validate(_all(order, p, m), m, window=p + 1)


@pytest.mark.parametrize(
    ("stages", "words"),
    [
        ([[Forward(0), Backward(0), Backward(0)]], "twice"),
        ([[Backward(0), Forward(0)]], "before its forward"),
        ([[Forward(0)]], "must have 2 actions"),
        ([[Forward(0), Backward(1)]], "outside"),
        ([[Forward(0), Forward(1), Backward(0), Backward(1)], [Forward(1), Backward(1), Forward(0), Backward(0)]],
         "would take"),
        ([[Forward(0), Backward(0), Forward(1), Backward(1)], [Forward(0), Forward(1), Backward(0), Backward(1)]],
         "wait for each other"),
    ],
)  # fmt: skip
def test_a_wrong_schedule_is_refused(stages: list, words: str) -> None:
    m = 1 if len(stages) == 1 else 2
    with pytest.raises(ScheduleError, match=words):
        validate(stages, m)


def test_unknown_schedules_are_refused_by_name() -> None:
    assert schedule_named("GPipe") is gpipe
    for name in ("interleaved", "zb-h1", "auto", 3, None):
        with pytest.raises(ValueError, match="must be one of"):
            schedule_named(name)
