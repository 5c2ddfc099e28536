"""The simulated time lines have the closed forms of the literature."""

from __future__ import annotations

import math

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tds.schedule import Backward, Costs, Forward, ScheduleError, Span, Timeline, simulate
from tds.schedule.schedules import _put_off
from tests.helpers.orders import QUICK, SMALL, TIMES, small_cases, stages_of

P, M = st.integers(1, 9), st.integers(1, 24)


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@SMALL
@given(P, M, TIMES, TIMES, TIMES)
def test_gpipe_and_1f1b_idle_for_p_minus_1_micro_batches(name: str, p: int, m: int, f: int, b: int, w: int) -> None:
    assume(f + b + w > 0)
    timeline = simulate(stages_of(name, p, m), Costs.even(p, f, b, w))
    assert math.isclose(timeline.bubble, (p - 1) / (m + p - 1), abs_tol=1e-12)
    assert timeline.idle_s == ((p - 1) * (f + b + w),) * p
    assert timeline.busy_s == (m * (f + b + w),) * p


@SMALL
@given(st.integers(2, 8), st.integers(1, 3), st.integers(2, 4), st.integers(1, 20), st.integers(1, 20), TIMES)
def test_interleaved_bubble_shrinks_with_the_chunks(p: int, rounds: int, c: int, f: int, b: int, w: int) -> None:
    m = rounds * p
    timeline = simulate(stages_of("interleaved", p, m, c), Costs.even(p * c, f, b, w), c)
    assert math.isclose(timeline.bubble, (p - 1) / (c * m + p - 1))


@SMALL
@given(st.integers(2, 8), M, st.integers(2, 4))
def test_a_short_round_costs_no_more_than_a_whole_one(p: int, m: int, c: int) -> None:
    whole = -(-m // p) * p
    costs = Costs.even(p * c, 1, 1, 1)
    short, full = (simulate(stages_of("interleaved", p, n, c), costs, c).step_s for n in (m, whole))
    assert short <= full


@SMALL
@given(P, M, TIMES, TIMES, TIMES)
def test_zb_h1_fills_the_bubble_with_weights(p: int, m: int, f: int, b: int, w: int) -> None:
    timeline = simulate(stages_of("zb-h1", p, m), Costs.even(p, f, b, w))
    assert timeline.idle_s == ((p - 1) * (f + b) - (min(p, m) - 1) * min(f, b, w),) * p
    if m >= p and w <= min(f, b):
        assert timeline.idle_s == ((p - 1) * (f + b - w),) * p


@SMALL
@given(st.integers(2, 8), st.integers(1, 3), st.integers(2, 4), st.integers(1, 20), st.integers(1, 20), TIMES)
def test_zb_h1_fills_the_bubble_of_chunks_too(p: int, rounds: int, c: int, f: int, b: int, w: int) -> None:
    assume(w <= min(f, b))
    timeline = simulate(stages_of("zb-h1", p, rounds * p, c), Costs.even(p * c, f, b, w), c)
    assert timeline.idle_s == ((p - 1) * (f + b - w),) * p


@SMALL
@given(st.integers(2, 8), M, st.integers(2, 4), st.integers(1, 20), st.integers(1, 20), TIMES)
def test_putting_weights_off_costs_no_time_on_even_stages(p: int, m: int, c: int, f: int, b: int, w: int) -> None:
    costs = Costs.even(p * c, f, b, w)
    split, whole = (simulate(stages_of(name, p, m, c), costs, c).step_s for name in ("zb-h1", "interleaved"))
    assert split <= whole


@SMALL
@given(st.integers(2, 7), M, st.integers(2, 4), st.integers(1, 20), st.integers(1, 20), TIMES)
def test_whole_backwards_of_stage_1_lose_nothing(p: int, m: int, c: int, f: int, b: int, w: int) -> None:
    """Against the order that splits every backward behind stage 0, on stages that are even."""
    assume(w <= min(f, b))
    costs = Costs.even(p * c, f, b, w)
    every = [
        _put_off(order, stage, 0) if stage else order for stage, order in enumerate(stages_of("interleaved", p, m, c))
    ]
    assert simulate(stages_of("zb-h1", p, m, c), costs, c).step_s <= simulate(every, costs, c).step_s


def test_zb_h1_has_a_third_of_the_bubble_when_all_are_equal() -> None:
    costs = Costs.even(8, 1, 1, 1)
    zero, plain = (simulate(stages_of(name, 8, 16), costs) for name in ("zb-h1", "1f1b"))
    assert zero.idle_s[0] * 3 == plain.idle_s[0] == 21


@SMALL
@given(st.lists(st.integers(1, 30), min_size=1, max_size=8), M)
def test_uneven_stages_take_the_slowest_m_times_and_the_others_once(times: list[int], m: int) -> None:
    """1F1B takes no longer, and less where stages ahead of the slowest have something else to do than to wait."""
    costs = Costs(tuple(times), tuple(times), tuple(times))
    gpipe, plain = (simulate(stages_of(name, len(times), m), costs).step_s for name in ("gpipe", "1f1b"))
    assert gpipe == 3 * (m * max(times) + sum(times) - max(times))
    assert plain == gpipe if times[-1] == max(times) else plain <= gpipe


@SMALL
@given(P, M, st.integers(1, 20), st.integers(1, 20), st.integers(0, 10))
def test_each_boundary_adds_its_transfer_twice_to_gpipe(p: int, m: int, f: int, b: int, transfer: int) -> None:
    timeline = simulate(stages_of("gpipe", p, m), Costs.even(p, f, b, 0, transfer))
    assert math.isclose(timeline.step_s, (m + p - 1) * (f + b) + 2 * (p - 1) * transfer)


@QUICK
@given(st.integers(1, 24), st.integers(1, 20), st.integers(1, 20), st.integers(0, 10))
def test_1f1b_waits_for_transfers_once_in_p_micro_batches(m: int, f: int, b: int, transfer: int) -> None:
    """Two stages hold two micro-batches, so every second one waits for a message there and back."""
    assume(2 * transfer <= f + b)
    timeline = simulate(stages_of("1f1b", 2, m), Costs.even(2, f, b, 0, transfer))
    assert math.isclose(timeline.step_s, (m + 1) * (f + b) + 2 * transfer * -(-m // 2))


@SMALL
@given(st.sampled_from(small_cases()), st.integers(0, 5), st.randoms(use_true_random=False))
def test_no_stage_does_two_things_at_once_or_ahead_of_a_message(case: tuple, transfer: int, random) -> None:
    name, p, m, c = case
    times = [tuple(random.randint(0, 9) for _ in range(p * c)) for _ in range(3)]
    costs = Costs(*times, transfer=transfer)
    timeline = simulate(stages_of(name, p, m, c), costs, c)
    ended = {}
    for stage, spans in enumerate(timeline.spans):
        assert all(before.end_s <= after.start_s for before, after in zip(spans, spans[1:], strict=False))
        ended |= {(type(s.action) is Forward, s.action.micro_batch, s.action.chunk * p + stage): s.end_s for s in spans}
    for stage, spans in enumerate(timeline.spans):
        for span in spans:
            piece = span.action.chunk * p + stage
            assert span.end_s - span.start_s == costs.of(span.action, piece)
            if isinstance(span.action, Forward) and piece > 0:
                assert span.start_s >= ended[True, span.action.micro_batch, piece - 1] + transfer
    assert timeline.step_s >= max(timeline.busy_s)


def test_a_time_line_knows_its_step_and_idle_time() -> None:
    timeline = Timeline(((Span(Forward(0), 0.0, 1.0), Span(Backward(0), 3.0, 4.0)), (Span(Forward(0), 1.0, 3.0),)))
    assert (timeline.step_s, timeline.busy_s, timeline.idle_s, timeline.bubble) == (4.0, (2.0, 2.0), (2.0, 2.0), 0.5)
    assert Timeline(((),)).bubble == 0.0


def test_costs_that_cannot_be_are_refused() -> None:
    with pytest.raises(ValueError, match="got 2, 1 and 2 values"):
        Costs((1.0, 1.0), (1.0,), (1.0, 1.0))
    with pytest.raises(ValueError, match="got 0, 0 and 0 values"):
        Costs((), (), ())
    with pytest.raises(ValueError, match="not negative, got -1 for backward_input of piece 0"):
        Costs.even(2, 1, -1, 1)
    with pytest.raises(ValueError, match="got nan for transfer"):
        Costs.even(2, transfer=math.nan)
    with pytest.raises(ValueError, match="2 stages x 1 chunks = 2, got 4"):
        simulate(stages_of("gpipe", 2, 2), Costs.even(4))
    with pytest.raises(ScheduleError, match="wait for each other"):
        simulate([[Backward(0), Forward(0)], [Forward(0), Backward(0)]], Costs.even(2))
