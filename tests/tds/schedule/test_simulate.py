"""The simulated time lines have the closed forms of the literature."""

from __future__ import annotations

import math

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tds.schedule import Backward, Costs, Forward, ScheduleError, Span, Timeline, simulate
from tds.schedule.schedules import _defer_weight_halves
from tests.helpers.orders import QUICK, SMALL, TIMES, schedule_by_stage, small_pipelines

P, M = st.integers(1, 9), st.integers(1, 24)


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@SMALL
@given(P, M, TIMES, TIMES, TIMES)
def test_gpipe_and_1f1b_idle_for_p_minus_1_micro_batches(name: str, p: int, m: int, f: int, b: int, w: int) -> None:
    assume(f + b + w > 0)
    timeline = simulate(schedule_by_stage(name, p, m), Costs.even(p, f, b, w))
    assert math.isclose(timeline.bubble, (p - 1) / (m + p - 1), abs_tol=1e-12)
    assert timeline.idle_s == ((p - 1) * (f + b + w),) * p
    assert timeline.busy_s == (m * (f + b + w),) * p


@SMALL
@given(st.integers(2, 8), st.integers(1, 3), st.integers(2, 4), st.integers(1, 20), st.integers(1, 20), TIMES)
def test_interleaved_bubble_shrinks_with_chunks(p: int, rounds: int, c: int, f: int, b: int, w: int) -> None:
    m = rounds * p
    timeline = simulate(schedule_by_stage("interleaved", p, m, c), Costs.even(p * c, f, b, w), c)
    assert math.isclose(timeline.bubble, (p - 1) / (c * m + p - 1))


@SMALL
@given(st.integers(2, 8), M, st.integers(2, 4))
def test_partial_round_costs_no_more_than_full_round(p: int, m: int, c: int) -> None:
    full_m = -(-m // p) * p
    costs = Costs.even(p * c, 1, 1, 1)
    short, full = (simulate(schedule_by_stage("interleaved", p, n, c), costs, c).step_s for n in (m, full_m))
    assert short <= full


@SMALL
@given(P, M, TIMES, TIMES, TIMES)
def test_zb_h1_fills_bubble_with_weight_halves(p: int, m: int, f: int, b: int, w: int) -> None:
    timeline = simulate(schedule_by_stage("zb-h1", p, m), Costs.even(p, f, b, w))
    assert timeline.idle_s == ((p - 1) * (f + b) - (min(p, m) - 1) * min(f, b, w),) * p
    if m >= p and w <= min(f, b):
        assert timeline.idle_s == ((p - 1) * (f + b - w),) * p


@SMALL
@given(st.integers(2, 8), st.integers(1, 3), st.integers(2, 4), st.integers(1, 20), st.integers(1, 20), TIMES)
def test_zb_h1_fills_bubble_with_chunks(p: int, rounds: int, c: int, f: int, b: int, w: int) -> None:
    assume(w <= min(f, b))
    timeline = simulate(schedule_by_stage("zb-h1", p, rounds * p, c), Costs.even(p * c, f, b, w), c)
    assert timeline.idle_s == ((p - 1) * (f + b - w),) * p


@SMALL
@given(st.integers(2, 8), M, st.integers(2, 4), st.integers(1, 20), st.integers(1, 20), TIMES)
def test_deferring_weights_costs_no_time_on_even_stages(p: int, m: int, c: int, f: int, b: int, w: int) -> None:
    costs = Costs.even(p * c, f, b, w)
    split, full = (simulate(schedule_by_stage(name, p, m, c), costs, c).step_s for name in ("zb-h1", "interleaved"))
    assert split <= full


@SMALL
@given(st.integers(2, 7), M, st.integers(2, 4), st.integers(1, 20), st.integers(1, 20), TIMES)
def test_full_backwards_on_stage_1_cost_no_time(p: int, m: int, c: int, f: int, b: int, w: int) -> None:
    """Against the order that splits every backward behind stage 0, on stages that are even."""
    assume(w <= min(f, b))
    costs = Costs.even(p * c, f, b, w)
    fully_split = [
        _defer_weight_halves(order, stage, 0) if stage else order
        for stage, order in enumerate(schedule_by_stage("interleaved", p, m, c))
    ]
    assert simulate(schedule_by_stage("zb-h1", p, m, c), costs, c).step_s <= simulate(fully_split, costs, c).step_s


def test_zb_h1_has_one_third_of_1f1b_bubble() -> None:
    costs = Costs.even(8, 1, 1, 1)
    zero, plain = (simulate(schedule_by_stage(name, 8, 16), costs) for name in ("zb-h1", "1f1b"))
    assert zero.idle_s[0] * 3 == plain.idle_s[0] == 21


@SMALL
@given(st.lists(st.integers(1, 30), min_size=1, max_size=8), M)
def test_uneven_stages_are_bound_by_slowest_stage(times: list[int], m: int) -> None:
    """1F1B takes no longer, and less where stages ahead of the slowest have something else to do than to wait."""
    costs = Costs(tuple(times), tuple(times), tuple(times))
    gpipe, plain = (simulate(schedule_by_stage(name, len(times), m), costs).step_s for name in ("gpipe", "1f1b"))
    assert gpipe == 3 * (m * max(times) + sum(times) - max(times))
    assert plain == gpipe if times[-1] == max(times) else plain <= gpipe


@SMALL
@given(P, M, st.integers(1, 20), st.integers(1, 20), st.integers(0, 10))
def test_every_boundary_adds_two_transfers_to_gpipe(p: int, m: int, f: int, b: int, transfer: int) -> None:
    timeline = simulate(schedule_by_stage("gpipe", p, m), Costs.even(p, f, b, 0, transfer))
    assert math.isclose(timeline.step_s, (m + p - 1) * (f + b) + 2 * (p - 1) * transfer)


@QUICK
@given(st.integers(1, 24), st.integers(1, 20), st.integers(1, 20), st.integers(0, 10))
def test_1f1b_waits_for_transfers_once_in_p_micro_batches(m: int, f: int, b: int, transfer: int) -> None:
    """Two stages hold two micro-batches, so every second one waits for a message there and back."""
    assume(2 * transfer <= f + b)
    timeline = simulate(schedule_by_stage("1f1b", 2, m), Costs.even(2, f, b, 0, transfer))
    assert math.isclose(timeline.step_s, (m + 1) * (f + b) + 2 * transfer * -(-m // 2))


@SMALL
@given(st.sampled_from(small_pipelines()), st.integers(0, 5), st.randoms(use_true_random=False))
def test_spans_do_not_overlap_and_follow_their_messages(case: tuple, transfer: int, random) -> None:
    name, p, m, c = case
    times = [tuple(random.randint(0, 9) for _ in range(p * c)) for _ in range(3)]
    costs = Costs(*times, transfer=transfer)
    timeline = simulate(schedule_by_stage(name, p, m, c), costs, c)
    end_times = {}
    for stage, spans in enumerate(timeline.spans):
        assert all(before.end_s <= after.start_s for before, after in zip(spans, spans[1:], strict=False))
        end_times |= {
            (type(s.action) is Forward, s.action.micro_batch, s.action.chunk * p + stage): s.end_s for s in spans
        }
    for stage, spans in enumerate(timeline.spans):
        for span in spans:
            virtual_stage = span.action.chunk * p + stage
            assert span.end_s - span.start_s == costs.time_of(span.action, virtual_stage)
            if isinstance(span.action, Forward) and virtual_stage > 0:
                assert span.start_s >= end_times[True, span.action.micro_batch, virtual_stage - 1] + transfer
    assert timeline.step_s >= max(timeline.busy_s)


def test_timeline_computes_step_and_idle_time() -> None:
    timeline = Timeline(((Span(Forward(0), 0.0, 1.0), Span(Backward(0), 3.0, 4.0)), (Span(Forward(0), 1.0, 3.0),)))
    assert (timeline.step_s, timeline.busy_s, timeline.idle_s, timeline.bubble) == (4.0, (2.0, 2.0), (2.0, 2.0), 0.5)
    assert Timeline(((),)).bubble == 0.0


def test_invalid_costs_are_rejected() -> None:
    with pytest.raises(ValueError, match="got 2, 1 and 2 values"):
        Costs((1.0, 1.0), (1.0,), (1.0, 1.0))
    with pytest.raises(ValueError, match="got 0, 0 and 0 values"):
        Costs((), (), ())
    with pytest.raises(ValueError, match="not negative, got -1 for backward_input of virtual stage 0"):
        Costs.even(2, 1, -1, 1)
    with pytest.raises(ValueError, match="got nan for transfer"):
        Costs.even(2, transfer=math.nan)
    with pytest.raises(ValueError, match="2 stages x 1 chunks = 2, got 4"):
        simulate(schedule_by_stage("gpipe", 2, 2), Costs.even(4))
    with pytest.raises(ScheduleError, match="wait for each other"):
        simulate([[Backward(0), Forward(0)], [Forward(0), Backward(0)]], Costs.even(2))
