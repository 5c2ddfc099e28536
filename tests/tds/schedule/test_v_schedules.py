"""Where pieces lie in a loop and in a V, and that ZB-V and DualPipeV run and hold what their tables say."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tds.schedule import (
    LOOP,
    Action,
    Backward,
    BackwardInput,
    BackwardWeight,
    Costs,
    Forward,
    Kind,
    Placement,
    ScheduleError,
    V,
    dual_pipe_v,
    forward_only,
    received,
    schedule_named,
    sent,
    simulate,
    validate,
    zero_bubble_v,
)
from tds.schedule.limits import receive_posts, send_window
from tds.schedule.simulate import IN_A_V, bubble, in_flight, share_split
from tests.helpers.orders import QUICK, SMALL, TIMES, all_stages, stages_of

KINDS = st.sampled_from((LOOP, V))
F, I, W = Forward, BackwardInput, BackwardWeight  # noqa: E741 - the letters of the pictures


def stages_in_a_v(name: str, p: int, m: int) -> list[list[Action]]:
    """Return what every stage does under the schedule of this name."""
    return all_stages(schedule_named(name, 2, V), p, m)


def test_pieces_go_down_and_up_again() -> None:
    loop, v = Placement(3, 2), Placement(3, 2, V)
    assert [loop.stage_of(piece) for piece in range(6)] == [0, 1, 2, 0, 1, 2]
    assert [v.stage_of(piece) for piece in range(6)] == [0, 1, 2, 2, 1, 0]
    assert [Placement(2, 3, V).stage_of(piece) for piece in range(6)] == [0, 1, 1, 0, 0, 1]
    assert (loop.last_stage, v.last_stage) == (2, 0)


@SMALL
@given(st.integers(1, 9), st.integers(2, 5), KINDS)
def test_each_piece_lies_on_one_stage_and_what_it_sends_is_what_the_next_waits_for(p: int, c: int, kind: str) -> None:
    placement = Placement(p, c, kind)
    assert sorted(piece for stage in range(p) for piece in placement.own_pieces(stage)) == list(range(p * c))
    places = {placement.piece(stage, chunk): (stage, chunk) for stage in range(p) for chunk in range(c)}
    assert all(placement.stage_of(piece) == stage for piece, (stage, _) in places.items())
    for action in (Forward, Backward, BackwardInput):
        for piece, (stage, chunk) in places.items():
            after = piece + (1 if action is Forward else -1)
            made = sent(action(7, chunk), stage, placement)
            if after not in places:
                assert made is None
                continue
            there, its_chunk = places[after]
            taken = received(action(7, its_chunk), there, placement)
            assert made is not None and taken is not None and (made.peer, taken.peer) == (there, stage)
            assert made.kind is taken.kind is (Kind.ACTIVATION if action is Forward else Kind.GRADIENT)
    assert received(BackwardWeight(7), 0, placement) is sent(BackwardWeight(7), 0, placement) is None


def test_a_placement_that_cannot_be_is_refused() -> None:
    for chunks, kind in ((2, "w"), (1, V)):
        with pytest.raises(ValueError, match=f"one of loop, v, and a v needs 2 or more .* got '{kind}' with {chunks}"):
            Placement(2, chunks, kind)


def check_v(name: str, p: int, m: int) -> None:
    """Prove a schedule with bounded sends; it holds what is said, and its messages arrive in order."""
    peaks = validate(stages_in_a_v(name, p, m), m, num_chunks=2, placement=V, window=p + 1)
    assert peaks == [in_flight(p, m, name, 2, stage) for stage in range(p)]
    assert max(peaks) <= 2 * p + (name == "dualpipev"), "in halves of a stage: 1F1B's first holds p stages"


@pytest.mark.parametrize("name", IN_A_V)
def test_a_v_runs_with_bounded_sends_and_holds_what_its_table_says(name: str) -> None:
    for p, m in itertools.product((2, 3, 4, 7), (1, 2, 3, 7, 8, 16)):
        check_v(name, p, m)


@pytest.mark.slow
@pytest.mark.parametrize("p", range(2, 17))
@pytest.mark.parametrize("name", IN_A_V)
def test_every_v_to_16_stages_and_64_micro_batches_runs(name: str, p: int) -> None:
    for m in range(1, 65):
        check_v(name, p, m)


@QUICK
@given(st.integers(2, 16), st.integers(1, 64), st.sampled_from(IN_A_V))
def test_gradients_of_each_weight_add_up_by_rising_micro_batch_and_limits_let_it_end(p: int, m: int, name: str) -> None:
    order = schedule_named(name, 2, V)
    for actions in all_stages(order, p, m):
        for chunk in range(2):
            for kinds in ((Backward, BackwardInput), (Backward, BackwardWeight)):
                own = [a.micro_batch for a in actions if isinstance(a, kinds) and a.chunk == chunk]
                assert own == list(range(m))
    assert send_window(order, p, m, 2, True, V) == min(p + 1, 2 * m)
    assert len(receive_posts(order, p, m, 2, V)) == p


@SMALL
@given(st.integers(2, 8), st.integers(1, 20))
def test_an_evaluation_runs_in_a_v(p: int, m: int) -> None:
    every = [forward_only(p, m, stage, 2) for stage in range(p)]
    validate(every, m, num_chunks=2, is_training=False, placement=V, window=2)


def test_zb_v_of_two_stages_by_hand() -> None:
    first, last = stages_in_a_v("zb-v", 2, 3)
    assert first == [
        F(0), F(1), F(2), F(0, 1), I(0, 1), W(0, 1), F(1, 1), I(1, 1), W(1, 1), Backward(0), F(2, 1), I(2, 1), W(2, 1),
        Backward(1), Backward(2),
    ]  # fmt: skip
    assert last == [
        F(0), F(0, 1), F(1), F(1, 1), Backward(0, 1), F(2), I(0), W(0), F(2, 1), Backward(1, 1), I(1), I(2, 1),
        I(2), W(1), W(2, 1), W(2),
    ]  # fmt: skip


@pytest.mark.parametrize("name", IN_A_V)
def test_backwards_are_whole_where_no_other_stage_waits_for_a_half(name: str) -> None:
    p, m = 4, 9
    placement = Placement(p, 2, V)
    for stage, actions in enumerate(stages_in_a_v(name, p, m)):
        for one, two in itertools.pairwise(actions):
            if isinstance(one, BackwardInput) and two == BackwardWeight(one.micro_batch, one.chunk):
                message = sent(one, stage, placement)
                assert message is not None and message.peer != stage
    assert not any(isinstance(a, BackwardInput) and a.chunk == 0 for a in stages_in_a_v("zb-v", p, m)[0])


def test_zb_v_has_at_most_a_quarter_of_the_bubble_of_1f1b_in_the_same_memory() -> None:
    for p, m in itertools.product((2, 4, 8), (16, 32)):
        even = Costs.even(2 * p, 0.5, 0.5, 0.5)
        found = simulate(stages_in_a_v("zb-v", p, m), even, 2, V).bubble
        plain = simulate(stages_of("1f1b", p, m), Costs.even(p, 1, 1, 1)).bubble
        assert found <= 0.25 * plain, (p, m)
        assert 0.5 * max(in_flight(p, m, "zb-v", 2, stage) for stage in range(p)) == in_flight(p, m, "1f1b", 1, 0)
    assert bubble(4, 8, "zb-v", 2) <= 0.25 * bubble(4, 8, "1f1b")


@pytest.mark.parametrize("name", IN_A_V)
def test_the_bubble_of_even_stages_is_near_the_one_that_is_simulated(name: str) -> None:
    for p, m in itertools.product((2, 3, 4, 8), (1, 2, 3, 5, 8, 15, 16, 40)):
        simulated = simulate(stages_in_a_v(name, p, m), Costs.even(2 * p), 2, V).bubble
        exact = m >= 2 * p or (name == "zb-v" and (m <= p or m >= 2 * p - 1))
        assert bubble(p, m, name, 2) == pytest.approx(simulated, abs=1e-9 if exact else 0.05), (p, m)


@pytest.mark.parametrize("name", IN_A_V)
def test_the_share_of_split_backwards_is_counted(name: str) -> None:
    for stage, actions in enumerate(stages_in_a_v(name, 4, 12)):
        split = sum(isinstance(action, BackwardInput) for action in actions)
        assert share_split(4, 12, name, stage, 2) == split / 24
    assert share_split(4, 12, "1f1b", 2, 1) == 0.0


@SMALL
@given(st.integers(2, 6), st.integers(1, 12), TIMES.filter(bool), TIMES.filter(bool), TIMES.filter(bool), TIMES)
def test_what_a_stage_hands_to_itself_takes_no_time(p: int, m: int, f: int, b: int, w: int, transfer: int) -> None:
    """On the last stage chunk 1 may follow chunk 0 at once, whatever a message takes."""
    spans = simulate(stages_in_a_v("zb-v", p, m), Costs.even(2 * p, f, b, w, transfer), 2, V).spans[-1]
    down, up = (next(s for s in spans if s.action == Forward(0, chunk)) for chunk in (0, 1))
    assert up.start_s == down.end_s


def test_an_order_for_a_loop_is_refused_in_a_v_and_the_circle_is_named() -> None:
    stages = stages_of("interleaved", 2, 4, 2)
    with pytest.raises(ScheduleError, match=r"wait for each other: stage 0 at .* for stage 1; stage 1 at .* for stage"):
        validate(stages, 4, num_chunks=2, placement=V)
    alone = [[Forward(0, 1), Forward(0, 0), Backward(0, 1), Backward(0, 0)]] * 2
    with pytest.raises(ScheduleError, match=r"stage 1 at Forward\(micro_batch=0, chunk=1\) for stage 1$"):
        validate(alone, 1, num_chunks=2, placement=V)


def test_schedules_of_a_v_are_found_by_name_and_placement() -> None:
    assert schedule_named("ZB-V", 2, V) is zero_bubble_v and schedule_named("dualpipev", 2, V) is dual_pipe_v
    for name, chunks, kind in (("zb-v", 2, LOOP), ("zb-v", 1, LOOP), ("dualpipev", 3, V)):
        with pytest.raises(
            ValueError, match=f"needs 2 chunks of layers per stage with the placement v, got {chunks} with "
        ):
            schedule_named(name, chunks, kind)
    with pytest.raises(
        ValueError, match=r"with the placement loop, got 2 with the placement v.*choose one of \['zb-v', 'dualpipev'\]"
    ):
        schedule_named("interleaved", 2, V)
    for order in (zero_bubble_v, dual_pipe_v):
        with pytest.raises(ValueError, match="needs 2 chunks"):
            order(2, 2, 0, 3)
        with pytest.raises(ValueError, match="needs num_stages >= 1"):
            order(2, 0, 0)


@pytest.mark.parametrize("p", [2, 3, 4, 5, 8])
def test_dualpipev_splits_as_many_backwards_as_the_reference_order(p: int) -> None:
    """Those of zero bubble in DeepSeek's DualPipeV: p - i - 1 of chunk 1 that are run at once in step 3, then step 6.

    In its step 6 the second half of i + 1 pairs is split, on an even stage from chunk 0 of the middle pair on; step 7
    splits chunk 0. On stage 0 no other stage waits for the gradient of chunk 0's input, so its backwards are whole.
    """
    for stage, actions in enumerate(stages_in_a_v("dualpipev", p, 2 * p + 3)):
        pairs, behind, middle = stage + 1, p - stage - 1, (stage + 1) // 2
        of_up = pairs - middle - (stage % 2 == 0)
        of_down = pairs - middle
        wanted = {1: behind + of_up, 0: behind + of_down if stage else 0}
        for chunk, number in wanted.items():
            found = [action for action in actions if isinstance(action, BackwardInput) and action.chunk == chunk]
            assert len(found) == number, (stage, chunk)
