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
from tds.schedule.schedules import forward_sequence
from tds.schedule.simulate import in_flight
from tests.helpers.orders import (
    FEW,
    LARGE_PIPELINES,
    MANY_CHUNKS,
    MICRO_BATCHES,
    ONE_CHUNK,
    QUICK,
    SMALL,
    STAGES,
    actions_by_stage,
    schedule_by_stage,
    small_pipelines,
)


def peaks_of(name: str, p: int, m: int, c: int = 1) -> list[int]:
    """Return the most in flight that the table of tds/schedule/schedules.py allows on each stage."""
    if c > 1:  # stage 1 of zb-h1 may hold one less where only its last round is split
        num_extra = 1 if name == "zb-h1" else 0
        return [min(2 * (p - stage - 1) + (c - 1) * p + 1 + num_extra * stage, m * c) for stage in range(p)]
    limits = {"1f1b": lambda stage: p - stage, "gpipe": lambda stage: m, "zb-h1": lambda stage: p}[name]
    return [min(limits(stage), m) for stage in range(p)]


@pytest.mark.parametrize("name", ONE_CHUNK)
@QUICK
@given(STAGES, MICRO_BATCHES)
def test_schedules_run_with_documented_peak_memory(name: str, p: int, m: int) -> None:
    assert validate(schedule_by_stage(name, p, m), m, window=p + 1) == peaks_of(name, p, m)


@pytest.mark.parametrize("name", MANY_CHUNKS)
@SMALL
@given(st.integers(2, 10), st.integers(1, 24), st.integers(2, 4))
@example(63, 5, 4)
def test_chunk_schedules_peak_at_most_megatrons_first_stage(name: str, p: int, m: int, c: int) -> None:
    check_chunks(name, p, m, c)


@pytest.mark.slow
@pytest.mark.parametrize("name", MANY_CHUNKS)
@FEW
@given(st.integers(2, 64), MICRO_BATCHES, st.integers(2, 3))
@example(64, 256, 2)
@example(64, 250, 2)
def test_chunk_schedules_with_many_stages_peak_at_most_megatrons(name: str, p: int, m: int, c: int) -> None:
    check_chunks(name, p, m, c)


def check_chunks(name: str, p: int, m: int, c: int) -> None:
    peaks, bounds = validate(schedule_by_stage(name, p, m, c), m, num_chunks=c, window=p), peaks_of(name, p, m, c)
    assert all(peak <= bound for peak, bound in zip(peaks, bounds, strict=True))
    assert max(peaks) <= peaks_of("interleaved", p, m, c)[0]
    if m % p == 0:
        assert [peak for i, peak in enumerate(peaks) if i != 1] == [bound for i, bound in enumerate(bounds) if i != 1]
        assert bounds[1] - peaks[1] <= (name == "zb-h1")


@SMALL
@given(st.integers(1, 12), st.integers(1, 40), st.integers(1, 4))
@example(64, 250, 2)
def test_forward_only_runs(p: int, m: int, c: int) -> None:
    order = functools.partial(forward_only, num_chunks=1 if p == 1 else c)
    validate(actions_by_stage(order, p, m), m, num_chunks=1 if p == 1 else c, is_training=False, window=2)


def test_every_small_pipeline_runs_with_bounded_buffers() -> None:
    """Row P14: no circle of waits, every message taken in order, for all stages 1-8 x micro-batches 1-16 x chunks."""
    for name, p, m, c in small_pipelines():
        peaks = validate(schedule_by_stage(name, p, m, c), m, num_chunks=c, window=p)
        bounds = peaks_of(name, p, m, c)
        assert all(peak <= bound for peak, bound in zip(peaks, bounds, strict=True)), (name, p, m, c)


@pytest.mark.parametrize(
    ("p", "m"), [LARGE_PIPELINES[0], *(pytest.param(*case, marks=pytest.mark.slow) for case in LARGE_PIPELINES[1:])]
)
@pytest.mark.parametrize("name", ONE_CHUNK)
def test_large_pipelines_run(name: str, p: int, m: int) -> None:
    validate(schedule_by_stage(name, p, m), m, window=p + 1)


@SMALL
@given(st.sampled_from(small_pipelines()))
def test_backwards_run_in_micro_batch_order_per_chunk(case: tuple[str, int, int, int]) -> None:
    name, p, m, c = case
    for actions in schedule_by_stage(name, p, m, c):
        for chunk in range(c):
            for action_types in ((Backward, BackwardInput), (Backward, BackwardWeight)):
                micro_batches = [a.micro_batch for a in actions if isinstance(a, action_types) and a.chunk == chunk]
                assert micro_batches == list(range(m))


def test_zb_h1_defers_weights_by_stage_index() -> None:
    last = schedule_by_stage("zb-h1", 3, 4)[2]
    assert last == [
        Forward(0), BackwardInput(0), Forward(1), BackwardInput(1), Forward(2), BackwardInput(2), BackwardWeight(0),
        Forward(3), BackwardInput(3), BackwardWeight(1), BackwardWeight(2), BackwardWeight(3),
    ]  # fmt: skip
    first = schedule_by_stage("zb-h1", 3, 4)[0]
    assert first[2:5] == [Forward(2), Backward(0), Forward(3)], "whole where nothing waits for the half"
    assert not any(isinstance(action, BackwardWeight) for action in first)


@SMALL
@given(st.integers(2, 8), st.integers(1, 20), st.integers(1, 4))
def test_zb_h1_is_base_schedule_with_deferred_weights(p: int, m: int, c: int) -> None:
    plain = schedule_by_stage("1f1b" if c == 1 else "interleaved", p, m, c)
    for stage, (unsplit, split) in enumerate(zip(plain, schedule_by_stage("zb-h1", p, m, c), strict=True)):
        merged = [Backward(a.micro_batch, a.chunk) if isinstance(a, BackwardInput) else a for a in split]
        assert [a for a in merged if not isinstance(a, BackwardWeight)] == unsplit
        inputs = [(a.micro_batch, a.chunk) for a in split if isinstance(a, BackwardInput)]
        weights = [(a.micro_batch, a.chunk) for a in split if isinstance(a, BackwardWeight)]
        last_rounds = min(m, p + m % p) if stage == 1 and c > 1 else m
        assert inputs == weights and len(weights) == (last_rounds * c if stage else 0)
        positions = [split.index(BackwardWeight(*key)) for key in weights]
        for idx, key in enumerate(weights):
            later = inputs[idx + stage] if idx + stage < len(inputs) else inputs[-1]
            assert positions[idx] > split.index(BackwardInput(*later)), key


def megatron_orders(p: int, m: int, c: int) -> list[list[Action]]:
    """Return Megatron's orders: a fixed warm-up, then forward and backward in turn. It asks that p divides m."""
    forwards = [Forward(*key) for key in forward_sequence(p, m, c)]
    backwards = [Backward(forward.micro_batch, c - 1 - forward.chunk) for forward in forwards]
    stages: list[list[Action]] = []
    for stage in range(p):
        warm_up = min(2 * (p - stage - 1) + (c - 1) * p, m * c)
        alternating = zip(forwards[warm_up:], backwards, strict=False)
        stages.append([*forwards[:warm_up], *itertools.chain(*alternating), *backwards[m * c - warm_up :]])
    return stages


@SMALL
@given(st.integers(2, 9), st.integers(1, 4), st.integers(2, 4))
def test_interleaved_with_full_rounds_equals_megatron_schedule(p: int, rounds: int, c: int) -> None:
    assert schedule_by_stage("interleaved", p, rounds * p, c) == megatron_orders(p, rounds * p, c)


@SMALL
@given(st.integers(2, 5), st.integers(0, 6), st.integers(1, 24), st.integers(2, 3))
def test_larger_micro_batch_group_raises_peak_memory(p: int, num_extra: int, m: int, c: int) -> None:
    for name in MANY_CHUNKS:
        order = schedule_named(name, c, group_size=p + num_extra)
        stages = actions_by_stage(order, p, m)
        peaks = validate(stages, m, num_chunks=c, window=p + num_extra)
        bounds = [in_flight(p, m, name, c, stage, group_size=p + num_extra) for stage in range(p)]
        assert all(peak <= bound for peak, bound in zip(peaks, bounds, strict=True))
        if num_extra == 0:
            assert stages == schedule_by_stage(name, p, m, c)
    groups = [Forward(*key) for key in forward_sequence(p + num_extra, m, c)]
    for actions in actions_by_stage(schedule_named("interleaved", c, group_size=p + num_extra), p, m):
        assert [action for action in actions if isinstance(action, Forward)] == groups


def test_group_smaller_than_stages_is_rejected() -> None:
    with pytest.raises(ValueError, match="as large as the number of stages, got 3 for 4 stages"):
        schedule_named("interleaved", 2, group_size=3)(4, 8, 0)


def test_interleaved_runs_where_megatron_schedule_deadlocks() -> None:
    with pytest.raises(
        ScheduleError, match="wait for each other: stage 0 at Forward.* for stage 4; stage 4 at Backward"
    ):
        validate(megatron_orders(5, 7, 2), 7, num_chunks=2)
    validate(schedule_by_stage("interleaved", 5, 7, 2), 7, num_chunks=2)


def test_schedule_named_depends_on_name_and_chunks() -> None:
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


@pytest.mark.parametrize("args", [(0, 1, 0), (1, 0, 0), (2, 2, 2), (2, 2, -1)])
def test_invalid_schedule_arguments_are_rejected(args: tuple[int, int, int]) -> None:
    chunked = [schedule_named(name, 2) for name in MANY_CHUNKS]
    for order in (*map(schedule_named, ONE_CHUNK), *chunked, forward_only):
        with pytest.raises(ValueError, match="a schedule needs num_stages >= 1"):
            order(*args)


def test_chunks_require_two_stages() -> None:
    for order in (interleaved, zero_bubble_h1, forward_only):
        with pytest.raises(ValueError, match="num_stages >= 2 for more than one chunk, got num_chunks=2, num_stages=1"):
            order(1, 4, 0, 2)
