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
    received_message,
    sent_message,
    validate,
)
from tests.helpers.orders import SMALL, schedule_by_stage, small_pipelines

F, B, I, W = Forward, Backward, BackwardInput, BackwardWeight  # noqa: E741 - the letters of the pictures


@pytest.mark.parametrize(
    ("actions", "message"),
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
        ([F(-1), B(0)], "out of range for 1 micro-batches"),
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
def test_invalid_order_of_one_stage_is_rejected(actions: Any, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        validate([actions], 1)


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        (
            [[F(0), F(1), B(0), B(1)], [F(1), B(1), F(0), B(0)]],
            r"received in the order in which they are sent: stage 1 at Forward\(micro_batch=1, chunk=0\) would receive "
            "the activation of micro-batch 0, virtual stage 0, from stage 0 instead of the activation of micro-batch 1",
        ),
        (
            [[F(0), F(1), I(0), I(1), W(0), W(1)], [F(0), F(1), I(1), I(0), W(0), W(1)]],
            "would receive the gradient of micro-batch 1, virtual stage 0, from stage 1 instead of the gradient of "
            "micro-batch 0",
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
def test_incompatible_stage_orders_are_rejected(stages: list[list[Action]], message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        validate(stages, 2)


def test_receive_of_other_chunks_message_is_rejected() -> None:
    stages = schedule_by_stage("interleaved", 2, 1, 2)
    stages[1] = [F(0, 1), F(0, 0), B(0, 1), B(0, 0)]
    message = (
        "would receive the activation of micro-batch 0, virtual stage 0, from stage 0 instead of the activation of "
        "micro-batch 0, virtual stage 2"
    )
    with pytest.raises(ScheduleError, match=message):
        validate(stages, 1, num_chunks=2)


def test_mixed_full_and_split_backwards_are_accepted() -> None:
    """Whole and split backwards may stand side by side, and stages may differ in it."""
    stages = [[F(0), F(1), I(0), B(1), W(0)], [F(0), B(0), F(1), I(1), W(1)]]
    with pytest.raises(ScheduleError, match="weights"):
        validate(stages, 2)
    stages[0] = [F(0), F(1), I(0), W(0), B(1)]
    assert validate(stages, 2) == [2, 1]


def test_forward_is_in_flight_until_weight_half_completes() -> None:
    assert validate([[F(0), I(0), F(1), I(1), W(0), W(1)]], 2) == [2]
    assert validate([[F(0), I(0), W(0), F(1), I(1), W(1)]], 2) == [1]


def test_evaluation_rejects_backwards() -> None:
    assert validate([[F(0), F(1)]], 2, is_training=False) == [2]
    with pytest.raises(ScheduleError, match="only have forwards"):
        validate([[F(0), B(0)]], 1, is_training=False)


def test_too_small_window_is_detected() -> None:
    stages = [[*map(F, range(4)), *map(B, range(4))], [F(0), B(0), F(1), B(1), F(2), B(2), F(3), B(3)]]
    validate(stages, 4)
    stages[1] = [F(0), B(0), F(1), B(1), F(2), B(2), F(3), B(3)]
    with pytest.raises(ScheduleError, match="wait for each other"):
        validate(stages, 4, window=1)


def drop(stages: list[list[Action]], rng: random.Random) -> None:
    """Leave one action out."""
    actions = rng.choice(stages)
    del actions[rng.randrange(len(actions))]


def duplicate(stages: list[list[Action]], rng: random.Random) -> None:
    """Do one action twice."""
    actions = rng.choice(stages)
    actions.insert(rng.randrange(len(actions)), rng.choice(actions))


def swap_micro_batches(stages: list[list[Action]], rng: random.Random) -> None:
    """Let two actions of one kind and chunk change places."""
    actions = rng.choice(stages)
    first = rng.randrange(len(actions))
    candidates = [
        i
        for i, a in enumerate(actions)
        if type(a) is type(actions[first]) and a.chunk == actions[first].chunk and i != first
    ]
    second = rng.choice(candidates)
    actions[first], actions[second] = actions[second], actions[first]


def move_to_front(stages: list[list[Action]], rng: random.Random) -> None:
    """Put an action that needs an earlier one ahead of all."""
    actions = rng.choice(stages)
    later = [i for i, a in enumerate(actions) if not isinstance(a, Forward)]
    actions.insert(0, actions.pop(rng.choice(later)))


def change_backward_type(stages: list[list[Action]], rng: random.Random) -> None:
    """Change a backward into the other kind of backward without what goes with it."""
    actions = rng.choice(stages)
    idx = rng.choice([i for i, a in enumerate(actions) if isinstance(a, (Backward, BackwardInput))])
    other = BackwardInput if isinstance(actions[idx], Backward) else Backward
    actions[idx] = other(actions[idx].micro_batch, actions[idx].chunk)


@pytest.mark.parametrize("mutate", [drop, duplicate, swap_micro_batches, move_to_front, change_backward_type])
@SMALL
@given(case=st.sampled_from([c for c in small_pipelines() if c[2] > 1]), seed=st.integers(0, 2**32))
def test_mutated_schedules_are_rejected(
    mutate: Callable[[list[list[Action]], random.Random], None], case: tuple[str, int, int, int], seed: int
) -> None:
    name, p, m, c = case
    stages = schedule_by_stage(name, p, m, c)
    mutate(stages, random.Random(seed))
    with pytest.raises(ScheduleError):
        validate(stages, m, num_chunks=c)


def can_complete(stages: list[list[Action]], num_chunks: int, rng: random.Random) -> bool:
    """Whether the stages reach their ends when any that can move may be the next to do so: an independent reading."""
    positions, queues = [0] * len(stages), {}
    while any(position < len(actions) for position, actions in zip(positions, stages, strict=True)):
        ready = []
        for stage, actions in enumerate(stages):
            if positions[stage] < len(actions):
                incoming = received_message(actions[positions[stage]], stage, Placement(len(stages), num_chunks))
                if incoming is None or queues.get((incoming.peer, stage, incoming.message_type)):
                    ready.append((stage, incoming))
        if not ready:
            return False
        stage, incoming = rng.choice(ready)
        action = stages[stage][positions[stage]]
        virtual_stage = action.chunk * len(stages) + stage
        neighbour = virtual_stage - 1 if isinstance(action, Forward) else virtual_stage + 1
        if incoming is not None and queues[incoming.peer, stage, incoming.message_type].pop(0) != (
            action.micro_batch,
            neighbour,
        ):
            return False
        outgoing = sent_message(action, stage, Placement(len(stages), num_chunks))
        if outgoing is not None:
            queues.setdefault((stage, outgoing.peer, outgoing.message_type), []).append(
                (action.micro_batch, virtual_stage)
            )
        positions[stage] += 1
    return True


@SMALL
@given(st.sampled_from([c for c in small_pipelines() if c[1] <= 4 and c[2] <= 6]), st.integers(0, 2**32))
def test_validate_agrees_with_brute_force_execution(case: tuple[str, int, int, int], seed: int) -> None:
    """Two neighbouring actions of a stage change places: refused exactly if it is wrong in itself or cannot run."""
    name, p, m, c = case
    stages = schedule_by_stage(name, p, m, c)
    rng = random.Random(seed)
    actions = rng.choice(stages)
    idx = rng.randrange(len(actions) - 1)
    first, second = actions[idx], actions[idx + 1]
    is_same_micro_batch = (first.micro_batch, first.chunk) == (second.micro_batch, second.chunk)
    is_reordered = type(first) is type(second) and first.chunk == second.chunk
    actions[idx], actions[idx + 1] = second, first
    should_run = not is_same_micro_batch and not is_reordered and can_complete(stages, c, rng)
    try:
        validate(stages, m, num_chunks=c)
    except ScheduleError:
        assert not should_run
    else:
        assert should_run
