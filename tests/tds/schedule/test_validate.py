"""``validate`` finds every mistake that a schedule can have, and says what must hold."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tds.schedule import (
    Action,
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    Placement,
    ScheduleError,
    received,
    sent,
    validate,
)
from tests.helpers.orders import SMALL, small_cases, stages_of

F, B, I, W = Forward, Backward, BackwardInput, BackwardWeight  # noqa: E741 - the letters of the pictures


@pytest.mark.parametrize(
    ("actions", "words"),
    [
        ([F(0), B(0), B(0)], r"Backward\(micro_batch=0, chunk=0\) must run once, after its Forward, but it follows"),
        ([F(0), F(0), B(0)], "must run once, before its backward, but it follows its Forward"),
        ([B(0), F(0)], "after its Forward, but it follows nothing"),
        ([F(0), W(0), I(0)], "after its BackwardInput, but it follows its Forward"),
        ([F(0), I(0), B(0)], "after its Forward, but it follows its BackwardInput"),
        ([F(0), B(0), W(0)], "after its BackwardInput, but it follows its full backward"),
        ([F(0), I(0)], "must have one BackwardWeight for each .*, got none for micro_batch=0, chunk=0"),
        ([F(0)], "must have one Backward for each"),
        ([], "must have one Forward for each"),
        ([F(0), B(1)], "out of range for 1 micro-batches and 1 chunks"),
        ([F(0), B(0, 1)], "out of range for 1 micro-batches and 1 chunks"),
        ([F(-1), B(0)], "outside 1 micro-batches"),
        ([F(0.0), B(0)], "must be integers"),  # type: ignore[arg-type]
        ([F(True), B(0)], "must be integers"),
        ([F(0), "B0"], r"must be a Forward, Backward, .* got str 'B0'"),
        ([Action(0)], "must be a Forward, Backward, .* got Action"),
        ([Forward, Backward], "must be a Forward, Backward, .* got type <class"),
        (None, "the order of stage 0 must be a list of Forward, .* got NoneType None"),
        (iter([F(0), B(0)]), "must be a list of Forward, .* got list_iterator"),
        ("F0 B0", "must be a list of Forward, .* got str 'F0 B0'"),
    ],
)  # fmt: skip
def test_what_is_no_order_for_one_stage_is_refused(actions: Any, words: str) -> None:
    with pytest.raises(ScheduleError, match=words):
        validate([actions], 1)


@pytest.mark.parametrize(
    ("stages", "words"),
    [
        (
            [[F(0), F(1), B(0), B(1)], [F(1), B(1), F(0), B(0)]],
            r"received in the order in which they are sent: stage 1 at Forward\(micro_batch=1, chunk=0\) would receive "
            "the activation of micro-batch 0, piece 0, from stage 0 instead of the activation of micro-batch 1",
        ),
        (
            [[F(0), F(1), I(0), I(1), W(0), W(1)], [F(0), F(1), I(1), I(0), W(0), W(1)]],
            "would receive the gradient of micro-batch 1, piece 0, from stage 1 instead of the gradient of micro-batch "
            "0",
        ),
        (
            [[F(0), B(0), F(1), B(1)], [F(0), F(1), B(0), B(1)]],
            r"wait for each other: stage 0 at Backward\(micro_batch=0, chunk=0\) for stage 1; stage 1 at "
            r"Forward\(micro_batch=1, chunk=0\) for stage 0$",
        ),
        (
            [[F(1), F(0), B(0), B(1)], [F(1), F(0), B(0), B(1)]],
            "stage 0: the forwards of a chunk must be in the order of .* .data are read in this order., got "
            "Forward.*=0",
        ),
        (
            [[F(0), F(1), B(1), B(0)], [F(0), F(1), B(1), B(0)]],
            "stage 0: the backwards of a chunk must be in the order of",
        ),
        (
            [[F(0), F(1), I(0), I(1), W(0), W(1)], [F(0), F(1), I(0), I(1), W(1), W(0)]],
            "stage 1: the backwards of weights of a chunk must be in the order of",
        ),
    ],
)
def test_stages_that_do_not_go_together_are_refused(stages: list[list[Action]], words: str) -> None:
    with pytest.raises(ScheduleError, match=words):
        validate(stages, 2)


def test_a_chunk_that_takes_what_was_sent_for_another_is_refused() -> None:
    stages = stages_of("interleaved", 2, 1, 2)
    stages[1] = [F(0, 1), F(0, 0), B(0, 1), B(0, 0)]
    words = (
        "would receive the activation of micro-batch 0, piece 0, from stage 0 instead of the activation of "
        "micro-batch 0, piece 2"
    )
    with pytest.raises(ScheduleError, match=words):
        validate(stages, 1, num_chunks=2)


def test_a_mixed_order_of_a_user_is_accepted() -> None:
    """Whole and split backwards may stand side by side, and stages may differ in it."""
    stages = [[F(0), F(1), I(0), B(1), W(0)], [F(0), B(0), F(1), I(1), W(1)]]
    with pytest.raises(ScheduleError, match="weights"):
        validate(stages, 2)
    stages[0] = [F(0), F(1), I(0), W(0), B(1)]
    assert validate(stages, 2) == [2, 1]


def test_a_forward_is_in_flight_until_the_weights_half_is_done() -> None:
    assert validate([[F(0), I(0), F(1), I(1), W(0), W(1)]], 2) == [2]
    assert validate([[F(0), I(0), W(0), F(1), I(1), W(1)]], 2) == [1]


def test_an_evaluation_has_forwards_only() -> None:
    assert validate([[F(0), F(1)]], 2, is_training=False) == [2]
    with pytest.raises(ScheduleError, match="only have forwards"):
        validate([[F(0), B(0)]], 1, is_training=False)


def test_a_window_that_is_too_small_is_found() -> None:
    stages = [[*map(F, range(4)), *map(B, range(4))], [F(0), B(0), F(1), B(1), F(2), B(2), F(3), B(3)]]
    validate(stages, 4)
    stages[1] = [F(0), B(0), F(1), B(1), F(2), B(2), F(3), B(3)]
    with pytest.raises(ScheduleError, match="wait for each other"):
        validate(stages, 4, window=1)


def drop(stages: list[list[Action]], where: random.Random) -> None:
    """Leave one action out."""
    actions = where.choice(stages)
    del actions[where.randrange(len(actions))]


def double(stages: list[list[Action]], where: random.Random) -> None:
    """Do one action twice."""
    actions = where.choice(stages)
    actions.insert(where.randrange(len(actions)), where.choice(actions))


def swap_micro_batches(stages: list[list[Action]], where: random.Random) -> None:
    """Let two actions of one kind and chunk change places."""
    actions = where.choice(stages)
    first = where.randrange(len(actions))
    like = [
        i
        for i, a in enumerate(actions)
        if type(a) is type(actions[first]) and a.chunk == actions[first].chunk and i != first
    ]
    second = where.choice(like)
    actions[first], actions[second] = actions[second], actions[first]


def hasten(stages: list[list[Action]], where: random.Random) -> None:
    """Put an action that needs an earlier one ahead of all."""
    actions = where.choice(stages)
    later = [i for i, a in enumerate(actions) if not isinstance(a, Forward)]
    actions.insert(0, actions.pop(where.choice(later)))


def whole_beside_half(stages: list[list[Action]], where: random.Random) -> None:
    """Change a backward into the other kind of backward without what goes with it."""
    actions = where.choice(stages)
    place = where.choice([i for i, a in enumerate(actions) if isinstance(a, (Backward, BackwardInput))])
    other = BackwardInput if isinstance(actions[place], Backward) else Backward
    actions[place] = other(actions[place].micro_batch, actions[place].chunk)


@pytest.mark.parametrize("spoil", [drop, double, swap_micro_batches, hasten, whole_beside_half])
@SMALL
@given(case=st.sampled_from([c for c in small_cases() if c[2] > 1]), seed=st.integers(0, 2**32))
def test_every_spoiled_schedule_is_refused(
    spoil: Callable[[list[list[Action]], random.Random], None], case: tuple[str, int, int, int], seed: int
) -> None:
    name, p, m, c = case
    stages = stages_of(name, p, m, c)
    spoil(stages, random.Random(seed))
    with pytest.raises(ScheduleError):
        validate(stages, m, num_chunks=c)


def runs_by_hand(stages: list[list[Action]], num_chunks: int, choice: random.Random) -> bool:
    """Whether the stages reach their ends when any that can move may be the next to do so: an independent reading."""
    places, wires = [0] * len(stages), {}
    while any(place < len(actions) for place, actions in zip(places, stages, strict=True)):
        able = []
        for stage, actions in enumerate(stages):
            if places[stage] < len(actions):
                need = received(actions[places[stage]], stage, Placement(len(stages), num_chunks))
                if need is None or wires.get((need.peer, stage, need.kind)):
                    able.append((stage, need))
        if not able:
            return False
        stage, need = choice.choice(able)
        action = stages[stage][places[stage]]
        piece = action.chunk * len(stages) + stage
        neighbour = piece - 1 if isinstance(action, Forward) else piece + 1
        if need is not None and wires[need.peer, stage, need.kind].pop(0) != (action.micro_batch, neighbour):
            return False
        made = sent(action, stage, Placement(len(stages), num_chunks))
        if made is not None:
            wires.setdefault((stage, made.peer, made.kind), []).append((action.micro_batch, piece))
        places[stage] += 1
    return True


@SMALL
@given(st.sampled_from([c for c in small_cases() if c[1] <= 4 and c[2] <= 6]), st.integers(0, 2**32))
def test_the_verdict_is_that_of_a_run_by_hand(case: tuple[str, int, int, int], seed: int) -> None:
    """Two neighbouring actions of a stage change places: refused exactly if it is wrong in itself or cannot run."""
    name, p, m, c = case
    stages = stages_of(name, p, m, c)
    choice = random.Random(seed)
    actions = choice.choice(stages)
    place = choice.randrange(len(actions) - 1)
    one, two = actions[place], actions[place + 1]
    is_own_mistake = (one.micro_batch, one.chunk) == (two.micro_batch, two.chunk)
    is_falling = type(one) is type(two) and one.chunk == two.chunk
    actions[place], actions[place + 1] = two, one
    should_run = not is_own_mistake and not is_falling and runs_by_hand(stages, c, choice)
    try:
        validate(stages, m, num_chunks=c)
    except ScheduleError:
        assert not should_run
    else:
        assert should_run
