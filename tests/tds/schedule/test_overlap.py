"""Forwards beside backwards as data: which make a pair, that no stage waits in a circle, and how long a step takes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tds.schedule import (
    Action,
    Backward,
    BackwardInput,
    Costs,
    Forward,
    ScheduleError,
    schedule_named,
    simulate,
    validate,
)
from tds.schedule.overlap import pairs, simulate_pairs, with_earlier_forwards
from tds.schedule.simulate import EARLIER, in_flight, placement_for

ROOT = Path(__file__).resolve().parents[3]
NAMES = sorted(EARLIER)


def stages_of(name: str, num_stages: int, num_micro_batches: int, earlier: bool = True) -> tuple[list[Any], int, str]:
    """Return (the actions of each stage, chunks, placement) of a schedule, with the forwards that pairs need."""
    chunks, placement = 1 if name == "1f1b" else 2, placement_for(name)
    order = schedule_named(name, chunks, placement)
    order = with_earlier_forwards(order, name) if earlier else order
    return [order(num_stages, num_micro_batches, stage) for stage in range(num_stages)], chunks, placement


def shared(num_pieces: int, share: float, backward: float = 1.0) -> tuple[Costs, Costs]:
    """Return costs with ``share`` of communication in forwards and backwards for the input, and the communication."""
    costs = Costs.even(num_pieces, 1 + share, (1 + share) * backward, 1.0)
    return costs, Costs.even(num_pieces, share, share * backward, 0.0)


@settings(max_examples=25, deadline=None)
@given(name=st.sampled_from(NAMES), p=st.integers(2, 6), m=st.integers(1, 14))
def test_orders_with_earlier_forwards_run_and_hold_what_is_planned(name: str, p: int, m: int) -> None:
    stages, chunks, placement = stages_of(name, p, m)
    plain, _, _ = stages_of(name, p, m, earlier=False)
    for with_pairs, without in zip(stages, plain, strict=True):
        assert sorted(map(repr, with_pairs)) == sorted(map(repr, without))
        assert [a for a in with_pairs if not isinstance(a, Forward)] == [
            a for a in without if not isinstance(a, Forward)
        ]
    peaks = validate(stages, m, num_chunks=chunks, placement=placement)
    for stage, peak in enumerate(peaks):
        planned = in_flight(p, m, name, chunks, stage, placement, has_pairs=True)
        assert peak <= planned
        if m >= 3 * p and m % p == 0:
            assert peak == planned or name in ("zb-v", "dualpipev")


@settings(max_examples=25, deadline=None)
@given(name=st.sampled_from(NAMES), p=st.integers(2, 6), m=st.integers(1, 14), share=st.sampled_from([0.0, 0.3, 1.0]))
def test_every_pair_is_of_two_micro_batches_or_chunks_and_no_stage_waits_for_ever(
    name: str, p: int, m: int, share: float
) -> None:
    stages, chunks, placement = stages_of(name, p, m)
    found = pairs(stages, chunks, placement)
    for actions, paired in zip(stages, found, strict=True):
        for first, second in zip(actions, actions[1:], strict=False):
            if first in paired:
                assert isinstance(first, Forward) and isinstance(second, (Backward, BackwardInput))
                assert (first.micro_batch, first.chunk) != (second.micro_batch, second.chunk)
    costs, waits = shared(p * chunks, share)
    timeline = simulate_pairs(stages, costs, waits, chunks, placement)
    assert [[span.action for span in spans] for spans in timeline.spans] == stages
    computed = m * chunks * 3.0
    assert timeline.step_s >= computed - 1e-6
    for spans in timeline.spans:  # one action, or a pair, at a time; never three
        for number, span in enumerate(spans[2:], start=2):
            assert span.start_s >= max(each.end_s for each in spans[: number - 1]) - 1e-9


@pytest.mark.parametrize("name", NAMES)
def test_most_of_a_long_step_is_pairs(name: str) -> None:
    stages, chunks, placement = stages_of(name, 4, 24)
    found = pairs(stages, chunks, placement)
    assert all(len(each) >= (9 if name == "zb-v" else 15) * chunks for each in found[1:]), [len(e) for e in found]


def test_a_backward_that_hangs_on_what_its_forward_sends_is_no_pair() -> None:
    # gpipe's first backward stands behind its last forward, and waits for it on the last stage
    order = schedule_named("gpipe", 1)
    stages = [order(3, 4, stage) for stage in range(3)]
    assert pairs(stages) == (frozenset(), frozenset(), frozenset({Forward(3)}))
    stuck = [[Forward(0), Backward(0)], [Forward(0)]]
    with pytest.raises(ScheduleError, match=r"stages wait for each other: \[0\]"):
        pairs(stuck)


@settings(max_examples=15, deadline=None)
@given(name=st.sampled_from(NAMES), p=st.integers(2, 5), m=st.integers(1, 10), transfer=st.sampled_from([0.0, 0.25]))
def test_without_pairs_a_step_takes_what_it_takes_in_turn(name: str, p: int, m: int, transfer: float) -> None:
    stages, chunks, placement = stages_of(name, p, m)
    costs = Costs.even(p * chunks, 1.5, 1.25, 1.0, transfer)
    waits = Costs.even(p * chunks, 0.5, 0.25, 0.0)
    none: list[frozenset[Action]] = [frozenset()] * p
    found = simulate_pairs(stages, costs, waits, chunks, placement, paired=none)
    assert found.step_s == pytest.approx(simulate(stages, costs, chunks, placement).step_s, rel=1e-9)
    assert not found.has_pairs


@pytest.mark.parametrize(
    ("share", "takes"),
    [
        (0.0, 3.0),  # all is computed: the sum of both
        (0.5, 3.5),  # each computes two thirds of its time, so both at 3/4 of their pace for 2; then 1.5 are left
        (3.0, 8.0),  # waits alone: the longer of the two
    ],
)
def test_a_pair_takes_what_two_evenly_mixed_actions_take(share: float, takes: float) -> None:
    order = [Forward(0), Forward(1), Backward(0), Backward(1)]
    costs, waits = shared(1, 0.0)
    costs = Costs((1 + share,), (2 + 2 * share,), (0.0,))
    waits = Costs((share,), (2 * share,), (0.0,))
    pair = simulate_pairs([order], costs, waits).spans[0][1:3]
    assert pair[0].start_s == pair[1].start_s == 1 + share
    assert pair[1].end_s - pair[1].start_s == pytest.approx(takes)


def test_other_schedules_are_refused() -> None:
    for name in ("gpipe", "zb-h1"):
        with pytest.raises(ValueError, match=f"got {name}. Use one of these"):
            with_earlier_forwards(schedule_named(name, 1), name)
