"""Placement of virtual stages in a loop and in a V; ZB-V and DualPipeV run and hold what their tables say."""

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
    MessageType,
    Placement,
    ScheduleError,
    V,
    dual_pipe_v,
    forward_only,
    received_message,
    schedule_named,
    sent_message,
    simulate,
    validate,
    zero_bubble_v,
)
from tds.schedule.limits import receive_posts, send_window
from tds.schedule.simulate import V_SCHEDULES, bubble, in_flight, split_fraction
from tests.helpers.orders import QUICK, SMALL, TIMES, actions_by_stage, schedule_by_stage

STYLES = st.sampled_from((LOOP, V))
F, I, W = Forward, BackwardInput, BackwardWeight  # noqa: E741 - the letters of the pictures


def v_stages(name: str, p: int, m: int) -> list[list[Action]]:
    """Return what every stage does under the schedule of this name."""
    return actions_by_stage(schedule_named(name, 2, V), p, m)


def test_v_placement_reverses_at_last_stage() -> None:
    loop, v = Placement(3, 2), Placement(3, 2, V)
    assert [loop.stage_of(virtual_stage) for virtual_stage in range(6)] == [0, 1, 2, 0, 1, 2]
    assert [v.stage_of(virtual_stage) for virtual_stage in range(6)] == [0, 1, 2, 2, 1, 0]
    assert [Placement(2, 3, V).stage_of(virtual_stage) for virtual_stage in range(6)] == [0, 1, 1, 0, 0, 1]
    assert (loop.last_stage, v.last_stage) == (2, 0)


@SMALL
@given(st.integers(1, 9), st.integers(2, 5), STYLES)
def test_placement_is_consistent_with_messages(p: int, c: int, style: str) -> None:
    placement = Placement(p, c, style)
    assert sorted(virtual_stage for stage in range(p) for virtual_stage in placement.virtual_stages_of(stage)) == list(
        range(p * c)
    )
    location_of = {placement.virtual_stage(stage, chunk): (stage, chunk) for stage in range(p) for chunk in range(c)}
    assert all(placement.stage_of(virtual_stage) == stage for virtual_stage, (stage, _) in location_of.items())
    for action in (Forward, Backward, BackwardInput):
        for virtual_stage, (stage, chunk) in location_of.items():
            next_virtual_stage = virtual_stage + (1 if action is Forward else -1)
            outgoing = sent_message(action(7, chunk), stage, placement)
            if next_virtual_stage not in location_of:
                assert outgoing is None
                continue
            peer_stage, peer_chunk = location_of[next_virtual_stage]
            incoming = received_message(action(7, peer_chunk), peer_stage, placement)
            assert (
                outgoing is not None and incoming is not None and (outgoing.peer, incoming.peer) == (peer_stage, stage)
            )
            assert (
                outgoing.message_type
                is incoming.message_type
                is (MessageType.ACTIVATION if action is Forward else MessageType.GRADIENT)
            )
    assert received_message(BackwardWeight(7), 0, placement) is sent_message(BackwardWeight(7), 0, placement) is None


def test_invalid_placement_is_rejected() -> None:
    for chunks, style in ((2, "w"), (1, V)):
        with pytest.raises(ValueError, match=f"one of loop, v, and v needs 2 or more .* got '{style}' with {chunks}"):
            Placement(2, chunks, style)


def check_v(name: str, p: int, m: int) -> None:
    """Prove a schedule with bounded sends; it holds what is said, and its messages arrive in order."""
    peaks = validate(v_stages(name, p, m), m, num_chunks=2, placement=V, window=p + 1)
    assert peaks == [in_flight(p, m, name, 2, stage) for stage in range(p)]
    assert max(peaks) <= 2 * p + (name == "dualpipev"), "in halves of a stage: 1F1B's first holds p stages"


@pytest.mark.parametrize("name", V_SCHEDULES)
def test_v_schedules_run_with_documented_peak_memory(name: str) -> None:
    for p, m in itertools.product((2, 3, 4, 7), (1, 2, 3, 7, 8, 16)):
        check_v(name, p, m)


@pytest.mark.slow
@pytest.mark.parametrize("p", range(2, 17))
@pytest.mark.parametrize("name", V_SCHEDULES)
def test_v_schedules_run_up_to_16_stages_and_64_micro_batches(name: str, p: int) -> None:
    for m in range(1, 65):
        check_v(name, p, m)


@QUICK
@given(st.integers(2, 16), st.integers(1, 64), st.sampled_from(V_SCHEDULES))
def test_v_backwards_run_in_micro_batch_order_within_limits(p: int, m: int, name: str) -> None:
    order = schedule_named(name, 2, V)
    for actions in actions_by_stage(order, p, m):
        for chunk in range(2):
            for action_types in ((Backward, BackwardInput), (Backward, BackwardWeight)):
                micro_batches = [a.micro_batch for a in actions if isinstance(a, action_types) and a.chunk == chunk]
                assert micro_batches == list(range(m))
    assert send_window(order, p, m, 2, True, V) == min(p + 1, 2 * m)
    assert len(receive_posts(order, p, m, 2, V)) == p


@SMALL
@given(st.integers(2, 8), st.integers(1, 20))
def test_evaluation_runs_with_v_placement(p: int, m: int) -> None:
    stages = [forward_only(p, m, stage, 2) for stage in range(p)]
    validate(stages, m, num_chunks=2, is_training=False, placement=V, window=2)


def test_zb_v_of_two_stages_matches_manual_order() -> None:
    first, last = v_stages("zb-v", 2, 3)
    assert first == [
        F(0), F(1), F(2), F(0, 1), I(0, 1), W(0, 1), F(1, 1), I(1, 1), W(1, 1), Backward(0), F(2, 1), I(2, 1), W(2, 1),
        Backward(1), Backward(2),
    ]  # fmt: skip
    assert last == [
        F(0), F(0, 1), F(1), F(1, 1), Backward(0, 1), F(2), I(0), W(0), F(2, 1), Backward(1, 1), I(1), I(2, 1),
        I(2), W(1), W(2, 1), W(2),
    ]  # fmt: skip


@pytest.mark.parametrize("name", V_SCHEDULES)
def test_backwards_are_split_only_if_other_stage_waits(name: str) -> None:
    p, m = 4, 9
    placement = Placement(p, 2, V)
    for stage, actions in enumerate(v_stages(name, p, m)):
        for current, following in itertools.pairwise(actions):
            if isinstance(current, BackwardInput) and following == BackwardWeight(current.micro_batch, current.chunk):
                message = sent_message(current, stage, placement)
                assert message is not None and message.peer != stage
    assert not any(isinstance(a, BackwardInput) and a.chunk == 0 for a in v_stages("zb-v", p, m)[0])


def test_zb_v_has_at_most_quarter_of_1f1b_bubble_at_same_memory() -> None:
    for p, m in itertools.product((2, 4, 8), (16, 32)):
        costs = Costs.even(2 * p, 0.5, 0.5, 0.5)
        zb_v_bubble = simulate(v_stages("zb-v", p, m), costs, 2, V).bubble
        baseline = simulate(schedule_by_stage("1f1b", p, m), Costs.even(p, 1, 1, 1)).bubble
        assert zb_v_bubble <= 0.25 * baseline, (p, m)
        assert 0.5 * max(in_flight(p, m, "zb-v", 2, stage) for stage in range(p)) == in_flight(p, m, "1f1b", 1, 0)
    assert bubble(4, 8, "zb-v", 2) <= 0.25 * bubble(4, 8, "1f1b")


@pytest.mark.parametrize("name", V_SCHEDULES)
def test_v_bubble_approximates_simulation(name: str) -> None:
    for p, m in itertools.product((2, 3, 4, 8), (1, 2, 3, 5, 8, 15, 16, 40)):
        simulated = simulate(v_stages(name, p, m), Costs.even(2 * p), 2, V).bubble
        exact = m >= 2 * p or (name == "zb-v" and (m <= p or m >= 2 * p - 1))
        assert bubble(p, m, name, 2) == pytest.approx(simulated, abs=1e-9 if exact else 0.05), (p, m)


@pytest.mark.parametrize("name", V_SCHEDULES)
def test_v_split_fraction_equals_schedule(name: str) -> None:
    for stage, actions in enumerate(v_stages(name, 4, 12)):
        split = sum(isinstance(action, BackwardInput) for action in actions)
        assert split_fraction(4, 12, name, stage, 2) == split / 24
    assert split_fraction(4, 12, "1f1b", 2, 1) == 0.0


@SMALL
@given(st.integers(2, 6), st.integers(1, 12), TIMES.filter(bool), TIMES.filter(bool), TIMES.filter(bool), TIMES)
def test_local_message_takes_no_transfer_time(p: int, m: int, f: int, b: int, w: int, transfer: int) -> None:
    """On the last stage chunk 1 may follow chunk 0 at once, whatever a message takes."""
    spans = simulate(v_stages("zb-v", p, m), Costs.even(2 * p, f, b, w, transfer), 2, V).spans[-1]
    down, up = (next(s for s in spans if s.action == Forward(0, chunk)) for chunk in (0, 1))
    assert up.start_s == down.end_s


def test_loop_schedule_is_rejected_with_v_placement() -> None:
    stages = schedule_by_stage("interleaved", 2, 4, 2)
    with pytest.raises(ScheduleError, match=r"wait for each other: stage 0 at .* for stage 1; stage 1 at .* for stage"):
        validate(stages, 4, num_chunks=2, placement=V)
    self_deadlock = [[Forward(0, 1), Forward(0, 0), Backward(0, 1), Backward(0, 0)]] * 2
    with pytest.raises(ScheduleError, match=r"stage 1 at Forward\(micro_batch=0, chunk=1\) for stage 1$"):
        validate(self_deadlock, 1, num_chunks=2, placement=V)


def test_v_schedules_require_name_and_placement() -> None:
    assert schedule_named("ZB-V", 2, V) is zero_bubble_v and schedule_named("dualpipev", 2, V) is dual_pipe_v
    for name, chunks, style in (("zb-v", 2, LOOP), ("zb-v", 1, LOOP), ("dualpipev", 3, V)):
        with pytest.raises(
            ValueError, match=f"needs 2 chunks of layers per stage with the placement v, got {chunks} with "
        ):
            schedule_named(name, chunks, style)
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
def test_dualpipev_splits_as_many_backwards_as_reference(p: int) -> None:
    """Those of zero bubble in DeepSeek's DualPipeV: p - i - 1 of chunk 1 that are run at once in step 3, then step 6.

    In its step 6 the second half of i + 1 pairs is split, on an even stage from chunk 0 of the middle pair on; step 7
    splits chunk 0. On stage 0 no other stage waits for the gradient of chunk 0's input, so its backwards are whole.
    """
    for stage, actions in enumerate(v_stages("dualpipev", p, 2 * p + 3)):
        num_pairs, num_later, num_middle = stage + 1, p - stage - 1, (stage + 1) // 2
        num_split_up = num_pairs - num_middle - (stage % 2 == 0)
        num_split_down = num_pairs - num_middle
        expected = {1: num_later + num_split_up, 0: num_later + num_split_down if stage else 0}
        for chunk, num_splits in expected.items():
            splits = [action for action in actions if isinstance(action, BackwardInput) and action.chunk == chunk]
            assert len(splits) == num_splits, (stage, chunk)
