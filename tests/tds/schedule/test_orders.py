"""Schedules are complete, in order, free from deadlock, and hold what their table says."""

from __future__ import annotations

import functools
import itertools

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tds.schedule import (
    SCHEDULE_NAMES,
    Action,
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    ScheduleError,
    forward_only,
    gpipe,
    interleaved,
    schedule_named,
    validate,
    zero_bubble_h1,
)
from tds.schedule.schedules import in_rounds
from tds.schedule.simulate import in_flight
from tests.helpers.orders import (
    BIG,
    FEW,
    MANY_CHUNKS,
    MICRO_BATCHES,
    ONE_CHUNK,
    QUICK,
    SMALL,
    STAGES,
    all_stages,
    small_cases,
    stages_of,
)


def peaks_of(name: str, p: int, m: int, c: int = 1) -> list[int]:
    """Return the most in flight that the table of tds/schedule/schedules.py allows on each stage."""
    if c > 1:  # stage 1 of zb-h1 may hold one less where only its last round is split
        more = 1 if name == "zb-h1" else 0
        return [min(2 * (p - stage - 1) + (c - 1) * p + 1 + more * stage, m * c) for stage in range(p)]
    held = {"1f1b": lambda stage: p - stage, "gpipe": lambda stage: m, "zb-h1": lambda stage: p}[name]
    return [min(held(stage), m) for stage in range(p)]


@pytest.mark.parametrize("name", ONE_CHUNK)
@QUICK
@given(STAGES, MICRO_BATCHES)
def test_a_schedule_runs_and_holds_what_its_table_says(name: str, p: int, m: int) -> None:
    assert validate(stages_of(name, p, m), m, window=p + 1) == peaks_of(name, p, m)


@pytest.mark.parametrize("name", MANY_CHUNKS)
@SMALL
@given(st.integers(2, 10), st.integers(1, 24), st.integers(2, 4))
@example(63, 5, 4)
def test_chunks_run_and_no_stage_holds_more_than_megatrons_first(name: str, p: int, m: int, c: int) -> None:
    check_chunks(name, p, m, c)


@pytest.mark.slow
@pytest.mark.parametrize("name", MANY_CHUNKS)
@FEW
@given(st.integers(2, 64), MICRO_BATCHES, st.integers(2, 3))
@example(64, 256, 2)
@example(64, 250, 2)
def test_many_stages_of_chunks_run_and_hold_no_more_than_megatrons_first(name: str, p: int, m: int, c: int) -> None:
    check_chunks(name, p, m, c)


def check_chunks(name: str, p: int, m: int, c: int) -> None:
    peaks, most = validate(stages_of(name, p, m, c), m, num_chunks=c, window=p), peaks_of(name, p, m, c)
    assert all(peak <= bound for peak, bound in zip(peaks, most, strict=True))
    assert max(peaks) <= peaks_of("interleaved", p, m, c)[0]
    if m % p == 0:
        assert [peak for i, peak in enumerate(peaks) if i != 1] == [bound for i, bound in enumerate(most) if i != 1]
        assert most[1] - peaks[1] <= (name == "zb-h1")


@SMALL
@given(st.integers(1, 12), st.integers(1, 40), st.integers(1, 4))
@example(64, 250, 2)
def test_forward_only_runs(p: int, m: int, c: int) -> None:
    order = functools.partial(forward_only, num_chunks=1 if p == 1 else c)
    validate(all_stages(order, p, m), m, num_chunks=1 if p == 1 else c, is_training=False, window=2)


def test_every_small_pipeline_runs_with_bounded_buffers() -> None:
    """Row P14: no circle of waits, every message taken in order, for all stages 1-8 x micro-batches 1-16 x chunks."""
    for name, p, m, c in small_cases():
        peaks = validate(stages_of(name, p, m, c), m, num_chunks=c, window=p)
        most = peaks_of(name, p, m, c)
        assert all(peak <= bound for peak, bound in zip(peaks, most, strict=True)), (name, p, m, c)


@pytest.mark.parametrize(("p", "m"), [BIG[0], *(pytest.param(*sizes, marks=pytest.mark.slow) for sizes in BIG[1:])])
@pytest.mark.parametrize("name", ONE_CHUNK)
def test_the_largest_run(name: str, p: int, m: int) -> None:
    validate(stages_of(name, p, m), m, window=p + 1)


@SMALL
@given(st.sampled_from(small_cases()))
def test_gradients_of_each_weight_add_up_by_rising_micro_batch(case: tuple[str, int, int, int]) -> None:
    name, p, m, c = case
    for actions in stages_of(name, p, m, c):
        for chunk in range(c):
            for kinds in ((Backward, BackwardInput), (Backward, BackwardWeight)):
                own = [a.micro_batch for a in actions if isinstance(a, kinds) and a.chunk == chunk]
                assert own == list(range(m))


def test_zb_h1_puts_off_weights_by_the_number_of_the_stage() -> None:
    last = stages_of("zb-h1", 3, 4)[2]
    assert last == [
        Forward(0), BackwardInput(0), Forward(1), BackwardInput(1), Forward(2), BackwardInput(2), BackwardWeight(0),
        Forward(3), BackwardInput(3), BackwardWeight(1), BackwardWeight(2), BackwardWeight(3),
    ]  # fmt: skip
    first = stages_of("zb-h1", 3, 4)[0]
    assert first[2:5] == [Forward(2), Backward(0), Forward(3)], "whole where nothing waits for the half"
    assert not any(isinstance(action, BackwardWeight) for action in first)


@SMALL
@given(st.integers(2, 8), st.integers(1, 20), st.integers(1, 4))
def test_zb_h1_is_the_plain_order_with_weights_put_off(p: int, m: int, c: int) -> None:
    plain = stages_of("1f1b" if c == 1 else "interleaved", p, m, c)
    for stage, (whole, split) in enumerate(zip(plain, stages_of("zb-h1", p, m, c), strict=True)):
        as_whole = [Backward(a.micro_batch, a.chunk) if isinstance(a, BackwardInput) else a for a in split]
        assert [a for a in as_whole if not isinstance(a, BackwardWeight)] == whole
        inputs = [(a.micro_batch, a.chunk) for a in split if isinstance(a, BackwardInput)]
        weights = [(a.micro_batch, a.chunk) for a in split if isinstance(a, BackwardWeight)]
        last_rounds = min(m, p + m % p) if stage == 1 and c > 1 else m
        assert inputs == weights and len(weights) == (last_rounds * c if stage else 0)
        trails = [split.index(BackwardWeight(*place)) for place in weights]
        for number, place in enumerate(weights):
            later = inputs[number + stage] if number + stage < len(inputs) else inputs[-1]
            assert trails[number] > split.index(BackwardInput(*later)), place


def megatron(p: int, m: int, c: int) -> list[list[Action]]:
    """Return Megatron's orders: a fixed warm-up, then forward and backward in turn. It asks that p divides m."""
    forwards = [Forward(*place) for place in in_rounds(p, m, c)]
    backwards = [Backward(forward.micro_batch, c - 1 - forward.chunk) for forward in forwards]
    stages: list[list[Action]] = []
    for stage in range(p):
        warm_up = min(2 * (p - stage - 1) + (c - 1) * p, m * c)
        turns = zip(forwards[warm_up:], backwards, strict=False)
        stages.append([*forwards[:warm_up], *itertools.chain(*turns), *backwards[m * c - warm_up :]])
    return stages


@SMALL
@given(st.integers(2, 9), st.integers(1, 4), st.integers(2, 4))
def test_interleaved_with_whole_rounds_is_megatrons_order(p: int, rounds: int, c: int) -> None:
    assert stages_of("interleaved", p, rounds * p, c) == megatron(p, rounds * p, c)


@SMALL
@given(st.integers(2, 5), st.integers(0, 6), st.integers(1, 24), st.integers(2, 3))
def test_a_larger_group_of_micro_batches_runs_and_holds_more(p: int, more: int, m: int, c: int) -> None:
    for name in MANY_CHUNKS:
        order = schedule_named(name, c, group_size=p + more)
        stages = all_stages(order, p, m)
        peaks = validate(stages, m, num_chunks=c, window=p + more)
        most = [in_flight(p, m, name, c, stage, group_size=p + more) for stage in range(p)]
        assert all(peak <= bound for peak, bound in zip(peaks, most, strict=True))
        if more == 0:
            assert stages == stages_of(name, p, m, c)
    groups = [Forward(*place) for place in in_rounds(p + more, m, c)]
    for actions in all_stages(schedule_named("interleaved", c, group_size=p + more), p, m):
        assert [action for action in actions if isinstance(action, Forward)] == groups


def test_a_group_smaller_than_the_stages_is_refused() -> None:
    with pytest.raises(ValueError, match="as large as the number of stages, got 3 for 4 stages"):
        schedule_named("interleaved", 2, group_size=3)(4, 8, 0)


def test_interleaved_runs_where_megatrons_order_would_stand_still() -> None:
    with pytest.raises(
        ScheduleError, match="wait for each other: stage 0 at Forward.* for stage 4; stage 4 at Backward"
    ):
        validate(megatron(5, 7, 2), 7, num_chunks=2)
    validate(stages_of("interleaved", 5, 7, 2), 7, num_chunks=2)


def test_schedules_are_found_by_name_and_number_of_chunks() -> None:
    assert schedule_named("GPipe") is gpipe
    assert schedule_named("interleaved", 2) is schedule_named("Interleaved", 2), "what is known of it is kept by it"
    assert schedule_named("interleaved", 2)(2, 4, 1) == interleaved(2, 4, 1, 2)
    for name in ("zb", "auto", 3, None):
        with pytest.raises(ValueError, match="must be one of"):
            schedule_named(name)
    with pytest.raises(
        ValueError, match=r"needs 2 or more chunks .* got 1\. .*tds\.PipelineModule\(\.\.\., chunks=2\)"
    ):
        schedule_named("interleaved")
    assert schedule_named("zb-h1", 3) is schedule_named("ZB-H1", 3) is not schedule_named("zb-h1", 2)
    assert SCHEDULE_NAMES == ("1f1b", "gpipe", "zb-h1", "interleaved", "zb-v", "dualpipev")
    for name in ("1f1b", "gpipe"):
        with pytest.raises(ValueError, match=r"needs one chunk .* got 3\. .* choose one of \['interleaved', 'zb-h1'\]"):
            schedule_named(name, 3)


@pytest.mark.parametrize("sizes", [(0, 1, 0), (1, 0, 0), (2, 2, 2), (2, 2, -1)])
def test_sizes_that_cannot_be_are_refused(sizes: tuple[int, int, int]) -> None:
    chunked = [schedule_named(name, 2) for name in MANY_CHUNKS]
    for order in (*map(schedule_named, ONE_CHUNK), *chunked, forward_only):
        with pytest.raises(ValueError, match="a schedule needs num_stages >= 1"):
            order(*sizes)


def test_chunks_need_two_stages() -> None:
    for order in (interleaved, zero_bubble_h1, forward_only):
        with pytest.raises(ValueError, match="num_stages >= 2 for more than one chunk, got num_chunks=2, num_stages=1"):
            order(1, 4, 0, 2)
